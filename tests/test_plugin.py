"""The pytest plugin: a marker that simulates a device for a test, and a fixture that is the device."""

import importlib
import importlib.metadata

import pytest
from fakes import needs_fake_gpu

from oomguard.testing import fake_gpu

PLUGIN = "oomguard.testing.plugin"
INSTALLED = any(entry.value == PLUGIN for entry in importlib.metadata.entry_points(group="pytest11"))
LOADED = () if INSTALLED else ("-p", PLUGIN)

RUNS_OUT = """
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1000)
    assert torch.zeros(10).sum() == 0
"""


@pytest.fixture
def run(pytester, request):
    """Run a test file in its own pytest and return the result."""
    pytester.syspathinsert(request.config.rootpath)
    # What the inner run imports is forgotten after it, and the compiler registers operators, which it can do once.
    importlib.import_module("torch._dynamo")

    def run(text, *options):
        pytester.makepyfile("import unittest\nimport pytest\nimport torch\n" + text.replace("RUNS_OUT", RUNS_OUT))
        return pytester.runpytest_inprocess(*LOADED, "-p", "no:cacheprovider", "--strict-markers", *options)

    return run


PASSING = {
    "the marker alone": """
@pytest.mark.oom_capacity("1KiB")
def test_it():RUNS_OUT""",
    "an int": """
@pytest.mark.oom_capacity(1024)
def test_it():RUNS_OUT""",
    "a class": """
@pytest.mark.oom_capacity("1KiB")
class TestIt:
    def test_it(self):
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1000)""",
    "a unittest": """
class TestIt(unittest.TestCase):
    @pytest.mark.oom_capacity("1KiB")
    def test_it(self):
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1000)""",
    "a module": """
pytestmark = pytest.mark.oom_capacity("1KiB")
def test_it():RUNS_OUT""",
    "the nearest marker": """
pytestmark = pytest.mark.oom_capacity("1GiB")
@pytest.mark.oom_capacity("1KiB")
def test_it():RUNS_OUT""",
    "one that fails": """
@pytest.mark.oom_capacity(fail_at=2)
def test_it(oom_simulation):
    torch.zeros(1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1)
    torch.zeros(1)
    assert (oom_simulation.allocations, oom_simulation.capacity_bytes) == (3, None)""",
    "the fixture": """
@pytest.mark.oom_capacity("1KiB")
def test_it(oom_simulation):
    torch.zeros(100)
    assert (oom_simulation.capacity_bytes, oom_simulation.peak_bytes) == (1024, 400)""",
    "other fixtures first": """
@pytest.fixture
def batch():
    return torch.zeros(1000)
@pytest.mark.oom_capacity("1KiB")
def test_it(batch):
    assert torch.cuda.mem_get_info() == (1024, 1024)""",
    "only one of the parameters": """
@pytest.mark.parametrize("fits", [True, pytest.param(False, marks=pytest.mark.oom_capacity("1KiB"))])
def test_it(fits):
    try:
        torch.zeros(1000)
    except torch.OutOfMemoryError:
        assert not fits
    else:
        assert fits""",
}


@pytest.mark.parametrize("text", PASSING.values(), ids=PASSING)
def test_a_marked_test_runs_on_a_simulated_device(run, text):
    result = run(text)
    result.assert_outcomes(passed=2 if "parametrize" in text else 1)


def test_the_device_is_gone_after_the_test_also_after_an_error(run):
    text = """
@pytest.mark.oom_capacity("1KiB")
def test_fails():
    torch.zeros(1000)
def test_after():
    torch.zeros(1000)
    assert not torch.cuda.mem_get_info.__module__.startswith("oomguard")"""
    result = run(text)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 KiB.*"])


ERRORS = {
    "no marker": (
        "def test_it(oom_simulation): pass",
        "oomguard: the fixture oom_simulation needs a marker: @pytest.mark.oom_capacity('64MiB') on the test",
    ),
    "no capacity": (
        "@pytest.mark.oom_capacity()\ndef test_it(): pass",
        "oomguard: @pytest.mark.oom_capacity: simulate_oom needs a capacity such as '64MiB', or fail_at=n *",
    ),
    "a bad capacity": (
        "@pytest.mark.oom_capacity('64')\ndef test_it(): pass",
        "oomguard: @pytest.mark.oom_capacity: capacity='64' is no size; *",
    ),
    "a bad type": (
        "@pytest.mark.oom_capacity(1.5)\ndef test_it(): pass",
        "oomguard: @pytest.mark.oom_capacity: capacity is bytes: *",
    ),
    "a bad allocation": (
        "@pytest.mark.oom_capacity(fail_at=0)\ndef test_it(): pass",
        "oomguard: @pytest.mark.oom_capacity: fail_at counts allocations from 1, got 0",
    ),
    "a bad name": (
        "@pytest.mark.oom_capacity(size=3)\ndef test_it(): pass",
        "oomguard: @pytest.mark.oom_capacity: simulate_oom() got an unexpected keyword argument 'size'",
    ),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_use_is_an_error_that_says_what_to_write(run, text, message):
    result = run(text)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ERROR at setup of test_it*", message])


def test_the_marker_and_the_fixture_explain_themselves(run):
    run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.oom_capacity(capacity=None, [*], fail_at=None): *"])
    run("", "--fixtures").stdout.fnmatch_lines(["oom_simulation*", "*Run the test on the simulated device*"])


ON_TWO_DEVICES = """
def test_it():
    assert [torch.cuda.mem_get_info(i)[1] >> 30 for i in range(torch.cuda.device_count())] == [4, 2]
    print("printed")
"""


@needs_fake_gpu
@pytest.mark.parametrize(("option", "shows"), [("--capture=fd", False), ("--capture=no", True)])
def test_a_whole_run_moves_to_the_fake_gpu(pytester, option, shows):
    pytester.makepyfile("import torch\n" + ON_TWO_DEVICES)

    result = pytester.runpytest_subprocess(*LOADED, "--fake-gpu=4GiB,2GiB", option, "-p", "no:cacheprovider")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["oomguard: fake GPU of 4GiB,2GiB; kernels are not run, values are zeros"])
    assert ("printed" in result.stdout.str()) is shows


WRONG_RUNS = {
    "no fake GPU": ("why_not", lambda: "the fake GPU needs luck", "ERROR: --fake-gpu: the fake GPU needs luck"),
    "no command line": (
        "environment",
        lambda capacity: {"OOMGUARD_FAKE_GPU_CAPACITY": "4"},
        "ERROR: --fake-gpu starts pytest anew, so it has to stand on the command line",
    ),
}


@pytest.mark.parametrize(("name", "answer", "message"), WRONG_RUNS.values(), ids=WRONG_RUNS)
def test_a_run_that_can_not_move_is_an_error_that_says_why(monkeypatch, run, name, answer, message):
    monkeypatch.setattr(fake_gpu, name, answer)

    result = run("", "--fake-gpu=4GiB")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_a_wrong_size_on_the_command_line_is_one_line(pytester):
    result = pytester.runpytest_subprocess(*LOADED, "--fake-gpu=4")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --fake-gpu: capacity='4' is no size; *"])
