"""The house holds: imports go down, the door is light, every public name is explained, and every example runs."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import oomguard

PACKAGE = Path(oomguard.__file__).parent
FLOORS = [  # from the ground up; a module imports only from floors below, and its own floor where the line says so
    {"errors", "report", "ranks", "memory.units", "memory.storages", "memory.oom", "memory.device"}
    | {"memory.trace", "memory.replay"},
    {"step.call", "step.inputs", "step.state", "step.audit", "step.attempt", "step.pieces"},
    {"search", "probe", "predict", "recovery", "testing.simulate", "testing"}
    | {"testing.fake_gpu", "testing.recorder", "testing.dry_run"},
    {"fit", "guard"},
    {"", "__main__", "testing.plugin"},
]
WITHIN = {  # what may be imported on the same floor, listed so that no cycle can grow
    "errors": {"report"},  # for annotations only
    "memory.oom": {"errors"},
    "ranks": {"errors"},
    "report": {"memory.units"},
    "memory.device": {"memory.storages", "memory.trace"},
    "memory.trace": {"memory.storages"},
    "memory.replay": {"memory.trace"},
    "probe": {"search"},
    "predict": {"probe", "search"},
    "step.inputs": {"step.call"},
    "step.attempt": {"step.state"},
    "step.pieces": {"step.attempt", "step.audit", "step.state"},
    "testing": {"testing.simulate"},
    "testing.dry_run": {"testing"},  # fake_gpu and recorder
}
MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix("__init__").removesuffix(".")
    for path in PACKAGE.rglob("*.py")
)


def file_of(module):
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports_of(module):
    for node in ast.walk(ast.parse(file_of(module).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "oomguard":
            yield node.module.removeprefix("oomguard").removeprefix(".")
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "oomguard":
                    yield name.name.removeprefix("oomguard").removeprefix(".")


def test_every_module_has_its_floor():
    rooms = {"memory", "step"}  # folders, which only say what is in them

    assert sorted(set().union(*FLOORS) | rooms) == MODULES


@pytest.mark.parametrize("module", sorted(set().union(*FLOORS)), ids=lambda name: name or "oomguard")
def test_imports_go_down(module):
    floor = next(i for i, names in enumerate(FLOORS) if module in names)
    allowed = set().union(*FLOORS[:floor]) | WITHIN.get(module, set())

    assert set(imports_of(module)) <= allowed


def test_the_door_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import oomguard;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - sys.stdlib_module_names), 'pytest' in sys.modules, 'matplotlib' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['oomguard', 'wrapt'] False False"


def test_public_names_are_sorted_and_explained():
    assert oomguard.__all__ == sorted(oomguard.__all__)
    for name in oomguard.__all__:
        thing = getattr(oomguard, name)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            sections = ["Args:"] * bool(inspect.signature(thing).parameters) + ["Example:"]
            assert all(section in thing.__doc__ for section in sections), name


@pytest.mark.parametrize(
    "name", ["oomguard", *(info.name for info in pkgutil.walk_packages(oomguard.__path__, "oomguard."))]
)
def test_every_example_in_a_docstring_runs(name):
    module = importlib.import_module(name)

    result = doctest.testmod(
        module, optionflags=doctest.ELLIPSIS, extraglobs={"torch": importlib.import_module("torch")}
    )

    assert result.failed == 0
