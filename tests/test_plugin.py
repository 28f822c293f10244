"""The pytest plugin: a marker that simulates a device for a test, and a fixture that is the device."""

import importlib.metadata

import pytest

PLUGIN = "oomguard.testing.plugin"
INSTALLED = any(entry.value == PLUGIN for entry in importlib.metadata.entry_points(group="pytest11"))

RUNS_OUT = """
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1000)
    assert torch.zeros(10).sum() == 0
"""


@pytest.fixture
def run(pytester, request):
    """Run a test file in its own pytest and return the result."""
    pytester.syspathinsert(request.config.rootpath)

    def run(text, *options):
        pytester.makepyfile("import unittest\nimport pytest\nimport torch\n" + text.replace("RUNS_OUT", RUNS_OUT))
        plugin = () if INSTALLED else ("-p", PLUGIN)
        return pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider", "--strict-markers", *options)

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
