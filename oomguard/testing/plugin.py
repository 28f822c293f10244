"""
The pytest plugin: simulated devices for single tests, and the fake GPU for a whole run.

The marker `oom_capacity` runs a test on a simulated device, and the fixture
`oom_simulation` is this device. `pytest --fake-gpu=16GiB` runs everything on a fake GPU
(several: `--fake-gpu=16GiB,8GiB`).

pytest loads it where oomguard is installed, and oomguard imports torch:
`pytest -p no:oomguard` does without both.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from oomguard.testing.simulate import Simulation

_MARKER = "oom_capacity"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(capacity=None, *, fail_at=None): run the test on a simulated device of this many bytes "
        "(an int or a text like '64MiB'), or with an out-of-memory error at the n-th allocation.",
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fake-gpu`."""
    parser.getgroup("oomguard").addoption(
        "--fake-gpu",
        metavar="CAPACITY",
        help="run everything on a fake GPU of this size, such as 16GiB; several with commas. Kernels are not run.",
    )


# Around the others, and so before pytest begins to capture: the run that takes this one's place must find the
# true output.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Start the whole run anew on the fake GPU where it is asked for: it has to be there before the process is."""
    capacity = early_config.known_args_namespace.fake_gpu
    if capacity is not None:
        _move_to_fake_gpu(capacity, early_config)
    return (yield)


def _move_to_fake_gpu(capacity: str, config: pytest.Config) -> None:
    """Replace this process by the same one on the fake GPU, unless it is there already."""
    from oomguard.errors import OOMGuardError  # noqa: PLC0415 - imports torch
    from oomguard.testing import fake_gpu  # noqa: PLC0415 - as above

    try:
        environment = fake_gpu.environment(capacity.split(","))
    except (OOMGuardError, ValueError) as error:
        raise pytest.UsageError(f"--fake-gpu: {str(error).removeprefix('oomguard: ')}") from None
    if all(os.environ.get(name) == value for name, value in environment.items()):
        return
    if list(config.invocation_params.args) != sys.argv[1:]:
        raise pytest.UsageError("--fake-gpu starts pytest anew, so it has to stand on the command line")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - the same words again


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say that the devices are fake."""
    capacity = config.getoption("fake_gpu")
    return None if capacity is None else f"oomguard: fake GPU of {capacity}; kernels are not run, values are zeros"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let marked tests use the fixture, whether they name it or not."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and item.get_closest_marker(_MARKER) is not None and "oom_simulation" not in names:
            # A new list: the old one is shared with the test's other parameters, which may carry no marker.
            item.fixturenames = [*names, "oom_simulation"]  # type: ignore[attr-defined]


@pytest.fixture
def oom_simulation(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    """
    Run the test on the simulated device of its `oom_capacity` marker, and give the device.

    It is entered after all other fixtures that the test names before it.
    """
    from oomguard.testing.simulate import simulate_oom  # noqa: PLC0415 - imports torch

    marker = request.node.get_closest_marker(_MARKER)
    if marker is None:
        pytest.fail(
            f"oomguard: the fixture oom_simulation needs a marker: @pytest.mark.{_MARKER}('64MiB') on the test",
            pytrace=False,
        )
    try:
        simulation = simulate_oom(*marker.args, **marker.kwargs)
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix("oomguard: ")
        pytest.fail(f"oomguard: @pytest.mark.{_MARKER}: {reason}", pytrace=False)
    with simulation:
        yield simulation
