"""`simulate_oom`: a device of a given size on the CPU, which answers what code asks about memory."""

import contextlib

import pytest
import torch

from oomguard.testing import simulate_oom

CAPACITY = 10_000
MODULES = (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory)

ANSWERS = {  # with 1000 bytes alive, after 3000, of 10,000
    "mem_get_info": (9000, CAPACITY),
    "get_memory_info": (9000, CAPACITY),
    "memory_allocated": 1000,
    "memory_reserved": 1000,
    "max_memory_allocated": 3000,
    "max_memory_reserved": 3000,
    "memory_summary": "simulated device: 1000 B of 9.77 KiB in use",
    "empty_cache": None,
    "synchronize": None,
    "ipc_collect": None,
    "reset_accumulated_memory_stats": None,
    "reset_peak_memory_stats": None,
    "reset_max_memory_allocated": None,
}
PATCHED = {*ANSWERS, "memory_stats", "get_device_properties"}
FUNCTIONS = [(module, name) for module in MODULES for name in sorted(PATCHED) if hasattr(module, name)]


def originals():
    return [(module.__name__, name, getattr(module, name)) for module, name in FUNCTIONS]


@contextlib.contextmanager
def used_device():
    with simulate_oom(CAPACITY) as device:
        kept = torch.zeros(250)
        torch.zeros(500)
        yield device
        del kept


@pytest.mark.parametrize("argument", [(), (0,), ("cuda:0",), (torch.device("cuda"),)], ids=str)
@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, name in FUNCTIONS if name in ANSWERS],
    ids=[f"{module.__name__}.{name}" for module, name in FUNCTIONS if name in ANSWERS],
)
def test_each_function_answers_for_the_device(module, name, argument):
    with used_device():
        assert getattr(module, name)(*argument) == ANSWERS[name]


@pytest.mark.parametrize("name", ["reset_peak_memory_stats", "reset_max_memory_allocated"])
def test_the_peak_can_be_reset_as_on_cuda(name):
    with used_device() as device:
        getattr(torch.cuda, name)()
        assert torch.cuda.max_memory_allocated() == device.peak_bytes == 1000


def test_statistics_and_properties_have_pytorchs_names():
    with used_device():
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == stats["reserved_bytes.all.current"] == 1000
        assert stats["allocated_bytes.all.peak"] == stats["active_bytes.all.peak"] == 3000
        assert stats["num_alloc_retries"] == stats["num_ooms"] == 0
        assert torch.cuda.get_device_properties(0).total_memory == CAPACITY


def test_every_function_is_the_same_object_again_afterwards():
    before = originals()
    with simulate_oom(CAPACITY):
        during = originals()
        with simulate_oom(CAPACITY):
            inside = originals()
        assert originals() == during
    assert originals() == before
    assert not {function for *_, function in before} & {function for *_, function in (*during, *inside)}

    with pytest.raises(KeyError), simulate_oom(CAPACITY):
        raise KeyError
    assert originals() == before


def test_the_truth_about_cuda_is_not_hidden():
    is_available, device_count = torch.cuda.is_available, torch.cuda.device_count
    with simulate_oom(CAPACITY):
        assert torch.cuda.is_available is is_available
        assert torch.cuda.device_count is device_count


def test_code_written_for_cuda_finds_its_batch_size():
    def batch_that_fits(item_bytes):
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        assert free <= total
        return free // item_bytes

    def survives(length):
        try:
            torch.zeros(length)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False
        return True

    with simulate_oom(CAPACITY):
        weights = torch.zeros(1000)
        assert batch_that_fits(4) == 1500
        assert (survives(1500), survives(1501)) == (True, False)
        del weights
        assert batch_that_fits(4) == 2500


@pytest.mark.parametrize(("written", "size"), [("64MiB", 2**26), ("1.5 KiB", 1536), (1536, 1536)])
def test_the_capacity_is_a_number_or_a_text(written, size):
    assert simulate_oom(written).capacity_bytes == size


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, r"^oomguard: simulate_oom needs a capacity such as '64MiB', or fail_at=n"),
        ({"capacity": "64"}, ValueError, r"^oomguard: capacity='64' is no size; write a number and one of "),
        ({"capacity": "64MB"}, ValueError, r"^oomguard: capacity='64MB' is no size"),
        ({"capacity": 0}, ValueError, r"^oomguard: capacity must be at least 1 byte, got 0$"),
        ({"capacity": -1}, ValueError, r"^oomguard: capacity must be at least 1 byte"),
        ({"capacity": 1.5}, TypeError, r"^oomguard: capacity is bytes: an int or a text like '8 GiB', not 1.5$"),
        ({"capacity": True}, TypeError, r"^oomguard: capacity is bytes"),
        ({"fail_at": 0}, ValueError, r"^oomguard: fail_at counts allocations from 1, got 0$"),
        ({"fail_at": True}, ValueError, r"^oomguard: fail_at counts allocations from 1, got True$"),
        ({"fail_at": "3"}, ValueError, r"^oomguard: fail_at counts allocations from 1, got '3'$"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        simulate_oom(**arguments)


def test_a_device_is_entered_once():
    device, before = simulate_oom(CAPACITY), originals()
    with device, pytest.raises(RuntimeError, match=r"^oomguard: a simulated device can be entered once"):
        device.__enter__()
    with pytest.raises(RuntimeError, match=r"call simulate_oom again for another$"):
        device.__enter__()
    device.__exit__(None, None, None)
    assert originals() == before


def test_what_was_used_can_be_read_afterwards():
    with simulate_oom(CAPACITY) as device:
        kept = torch.zeros(100)
        torch.zeros(200)
    assert (device.live_bytes, device.peak_bytes, device.allocations) == (400, 1200, 2)
    device.reset_peak()
    assert device.peak_bytes == kept.nbytes
    torch.zeros(1000)
    assert device.allocations == 2


def test_tensors_from_before_are_not_counted():
    x = torch.zeros(10_000)
    with simulate_oom(CAPACITY) as device:
        assert (x[:1000] + 1).nbytes == device.peak_bytes == 4000


def test_the_allocation_to_fail_can_be_set_as_it_runs():
    with simulate_oom(fail_at=1) as device:
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
        torch.zeros(1)
        device.fail_at = device.allocations + 2
        torch.zeros(1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
        device.fail_at = None
        torch.zeros(1)
        with pytest.raises(ValueError, match="fail_at counts allocations from 1"):
            device.fail_at = 0
    assert (device.fail_at, device.allocations) == (None, 5)


def test_without_a_capacity_the_machines_memory_is_free(mocker):
    mocker.patch("oomguard.testing.simulate.available_bytes", return_value=5000)
    with simulate_oom(fail_at=100) as device:
        kept = torch.zeros(250)
        assert device.capacity_bytes is None
        assert torch.cuda.mem_get_info() == (5000, 5000 + kept.nbytes)


def test_both_of_two_nested_devices_count_and_the_inner_one_answers():
    with simulate_oom(CAPACITY) as outer:
        kept = torch.zeros(100)
        with simulate_oom(1000) as inner:
            assert torch.cuda.mem_get_info() == (1000, 1000)
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(251)
        assert torch.cuda.mem_get_info() == (CAPACITY - kept.nbytes, CAPACITY)
    assert (outer.peak_bytes, inner.peak_bytes) == (400 + 1004, 0)
