"""What a device says about its memory: capacity, budget, peak, cache."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from oomguard.memory import device as device_module
from oomguard.memory.device import _control_group_bytes, available_bytes, memory_of
from oomguard.testing import simulate_oom

CPU = torch.device("cpu")
MIB = 2**20


# The CPU.


def test_a_given_capacity_is_the_cpus():
    memory = memory_of(CPU, capacity_bytes=1000)
    assert (memory.device, memory.capacity_bytes) == (CPU, 1000)
    assert [memory.budget_bytes(headroom) for headroom in (0, 0.05, 0.5)] == [1000, 950, 500]


def test_without_a_capacity_it_is_what_is_held_and_what_is_left(mocker):
    mocker.patch.object(device_module, "available_bytes", return_value=700)
    assert memory_of(CPU, held_bytes=300).capacity_bytes == 1000


@pytest.mark.parametrize(
    ("machine", "group", "process", "left"),
    [(3, 5, 7, 3), (5, 3, 7, 3), (7, 5, 3, 3), (5, -3, 7, 0)],
    ids=["machine", "control group", "address space", "nothing"],
)
def test_the_least_of_all_limits_is_available(mocker, machine, group, process, left):
    for name, value in {"_machine": machine, "_control_group": group, "_address_space": process}.items():
        mocker.patch.object(device_module, f"{name}_bytes", return_value=value)
    assert available_bytes() == left


def test_a_measured_block_may_take_what_the_budget_leaves_beside_what_is_held():
    memory = memory_of(CPU, capacity_bytes=10_000, held_bytes=1000)

    with memory.measure(5000) as peak:
        torch.ones(1000)
    assert (peak.allocated_bytes, peak.reserved_bytes) == (5000, 5000)

    with pytest.raises(torch.OutOfMemoryError), memory.measure(4999) as peak:
        torch.ones(1000)
    assert peak.allocated_bytes == 1000

    with pytest.raises(torch.OutOfMemoryError), memory.measure(999):
        torch.ones(1)


def test_a_block_is_refused_before_it_touches_memory():
    with pytest.raises(torch.OutOfMemoryError), memory_of(CPU, capacity_bytes=MIB).measure(MIB):
        torch.zeros(2**50)


@pytest.mark.parametrize(("left", "is_short"), [(99, True), (100, False), (1000, False)])
def test_a_machine_is_short_with_less_than_a_tenth_left(mocker, left, is_short):
    memory = memory_of(CPU, capacity_bytes=1000)
    mocker.patch.object(device_module, "available_bytes", return_value=left)
    assert memory.is_short() is is_short


def test_the_cpus_peak_is_the_processs_and_its_cache_is_empty():
    memory = memory_of(CPU, capacity_bytes=1000)
    memory.empty_cache()
    assert 10 * MIB < memory.peak_bytes() < 2**40


@pytest.mark.parametrize(("platform", "factor"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_is_read_in_the_systems_own_unit(mocker, platform, factor):
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=5))
    mocker.patch.dict(sys.modules, {"resource": usage})
    mocker.patch.object(sys, "platform", platform)
    assert memory_of(CPU, capacity_bytes=1).peak_bytes() == 5 * factor


# Inside a simulation.


def test_inside_a_simulation_the_cpu_is_its_device():
    with simulate_oom(1000) as simulation:
        memory = memory_of(CPU, held_bytes=10**9)
        assert (memory.capacity_bytes, memory.budget_bytes(0.1)) == (1000, 900)
        x = torch.ones(200)
        assert memory.peak_bytes() == 800
        assert not memory.is_short()
        y = torch.ones(30)
        assert memory.is_short()
        del x
        with memory.measure(900) as peak:
            torch.ones(10)
        assert peak.allocated_bytes == peak.reserved_bytes == simulation.peak_bytes == 160
        with pytest.raises(torch.OutOfMemoryError), memory.measure(900) as peak:
            torch.ones(500)
        assert peak.allocated_bytes == y.nbytes


@pytest.mark.parametrize(("given", "capacity"), [(None, 1000), (400, 400), (4000, 1000)])
def test_a_given_capacity_only_makes_a_simulated_device_smaller(given, capacity):
    with simulate_oom(1000):
        assert memory_of(CPU, capacity_bytes=given).capacity_bytes == capacity


def test_a_simulation_without_a_capacity_leaves_the_cpu_what_it_is():
    with simulate_oom(fail_at=100), memory_of(CPU, capacity_bytes=1000).measure(1000) as peak:
        torch.ones(10)
    assert peak.allocated_bytes == 40


# Control groups.

V1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"

GROUPS = {
    "none": ({}, None, sys.maxsize),
    "no limit": ({"memory.max": "max\n", "memory.current": "10\n"}, "0::/\n", sys.maxsize),
    "version 2": ({"memory.max": "100", "memory.current": "30"}, None, 70),
    "its cache is free": (
        {"memory.max": "100", "memory.current": "30", "memory.stat": "anon 5\ninactive_file 20\n"},
        None,
        90,
    ),
    "a stat without the cache": ({"memory.max": "9", "memory.current": "3", "memory.stat": "anon 5\n"}, None, 6),
    "version 1": ({V1[0]: "100", V1[1]: "30", V1[2]: "total_inactive_file 20\ninactive_file 3\n"}, None, 90),
    "version 1, unlimited": ({V1[0]: "9223372036854771712", V1[1]: "0"}, None, 9223372036854771712),
    "over its limit": ({"memory.max": "100", "memory.current": "130"}, None, -30),
    "the own group": ({"a/b/memory.max": "100", "a/b/memory.current": "30"}, "0::/a/b\n", 70),
    "a group around it": (
        {
            "a/memory.max": "50",
            "a/memory.current": "40",
            "a/b/memory.max": "100",
            "a/b/memory.current": "30",
            "memory.max": "max",
        },
        "0::/a/b\n",
        10,
    ),
    "another's group": ({"c/memory.max": "50", "c/memory.current": "40"}, "0::/a/b\n", sys.maxsize),
    "version 1, the own group": (
        {"memory/a/memory.limit_in_bytes": "100", "memory/a/memory.usage_in_bytes": "30"},
        "7:pids:/z\n4:hugetlb,memory:/a\n1:name=systemd:/x\n0::/\n",
        70,
    ),
    "a name with a colon": ({"a:b/memory.max": "100", "a:b/memory.current": "30"}, "0::/a:b\n", 70),
    "in a container, the path outside": ({"memory.max": "100", "memory.current": "30"}, "0::/docker/f00\n", 70),
}


@pytest.mark.parametrize(("files", "own", "left"), GROUPS.values(), ids=GROUPS)
def test_the_control_group_and_every_one_around_it_count(tmp_path, files, own, left):
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert _control_group_bytes(tmp_path / "root", tmp_path / "own") == left


# What the system says.


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limit_on_the_address_space_counts():
    code = """
import resource
from oomguard.memory.device import available_bytes
limit = 2**30 + next(int(row.split()[1]) for row in open('/proc/self/status') if row.startswith('VmSize')) * 1024
before = available_bytes()
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(before, available_bytes())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    before, after = map(int, result.stdout.split())
    assert min(before, 2**30 - 64 * MIB) <= after <= 2**30


@pytest.mark.parametrize(("limit", "left"), [(-1, sys.maxsize), (10_000, 10_000 - 3 * 1024)])
def test_the_address_space_that_is_left_is_the_limit_less_what_is_mapped(mocker, limit, left):
    limits = SimpleNamespace(RLIMIT_AS=9, RLIM_INFINITY=-1, getrlimit=lambda _: (limit, -1))
    mocker.patch.dict(sys.modules, {"resource": limits})
    mocker.patch.object(device_module, "_table", return_value={"VmSize:": 3, "VmRSS:": 1})
    assert device_module._address_space_bytes() == left


@pytest.fixture
def no_proc(mocker):
    return mocker.patch.object(device_module, "_table", side_effect=FileNotFoundError)


@pytest.mark.usefixtures("no_proc")
def test_half_of_all_memory_counts_where_the_system_does_not_tell_what_is_left(mocker):
    mocker.patch.object(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4}.__getitem__, create=True)
    assert device_module._machine_bytes() == 2000


@pytest.mark.usefixtures("no_proc")
def test_a_system_that_tells_nothing_wants_a_capacity(mocker):
    mocker.patch.object(os, "sysconf", create=True)
    mocker.patch.dict(sys.modules, {"resource": None})
    del os.sysconf
    with pytest.raises(ValueError, match=r"^oomguard: this system does not tell .* say it with capacity='8 GiB'$"):
        memory_of(CPU)
    memory = memory_of(CPU, capacity_bytes=1000)
    assert memory.peak_bytes() == 0
    with memory.measure(1000) as peak:
        torch.ones(10)
    assert peak.allocated_bytes == 40
    assert device_module._address_space_bytes() == sys.maxsize


# Devices with PyTorch's caching allocator.


class FakeDevice:
    """A device's module as `torch.get_device_module` gives it."""

    def __init__(self):
        self.calls = []
        self.free, self.total, self.reserved, self.allocated = 600, 1000, 300, 200
        self.most_allocated, self.most_reserved = 250, 350

    def mem_get_info(self, _):
        return self.free, self.total

    def memory_reserved(self, _):
        return self.reserved

    def memory_allocated(self, _):
        return self.allocated

    def max_memory_allocated(self, _):
        return self.most_allocated

    def max_memory_reserved(self, _):
        return self.most_reserved

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)


@pytest.fixture
def fake(mocker):
    fake = FakeDevice()
    mocker.patch.object(torch, "get_device_module", return_value=fake)
    return fake


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize(
    ("capacity", "headroom", "budget"),
    [
        (None, 0, 900),  # 600 free and 300 held by this process
        (None, 0.05, 850),
        (2000, 0.05, 850),  # more than it has is what it has
        (500, 0.1, 450),
        (950, 0.1, 805),
    ],
)
def test_the_budget_is_what_is_free_or_held_less_the_headroom(fake, kind, capacity, headroom, budget):
    memory = memory_of(torch.device(kind, 0), capacity_bytes=capacity)
    assert memory.capacity_bytes == min(fake.total, capacity or fake.total)
    assert memory.budget_bytes(headroom) == budget


def test_a_measurement_starts_from_an_empty_cache_and_ends_when_the_device_is_done(fake):
    memory = memory_of(torch.device("cuda", 0))
    with memory.measure(900) as peak:
        assert fake.calls == ["empty_cache", "reset_peak_memory_stats"]
    assert fake.calls[2:] == ["synchronize"]
    assert (peak.allocated_bytes, peak.reserved_bytes) == (250, 350)
    assert memory.peak_bytes() == 350


def test_a_failed_measurement_tells_its_peak_too(fake):
    fake.most_allocated = 777
    with pytest.raises(torch.OutOfMemoryError), memory_of(torch.device("cuda", 0)).measure(900) as peak:
        raise torch.OutOfMemoryError
    assert peak.allocated_bytes == 777
    assert "synchronize" not in fake.calls  # it would wait for a device that may be broken


@pytest.mark.parametrize(("free", "allocated", "is_short"), [(0, 201, True), (0, 200, False), (600, 200, False)])
def test_a_device_is_short_with_less_than_a_tenth_free_or_reusable(fake, free, allocated, is_short):
    fake.free, fake.allocated = free, allocated
    assert memory_of(torch.device("cuda", 0)).is_short() is is_short


# Apple's.


@pytest.fixture
def metal(mocker):
    return mocker.patch.object(
        torch,
        "mps",
        mocker.Mock(
            **{
                "recommended_max_memory.return_value": 1000,
                "driver_allocated_memory.return_value": 400,
                "current_allocated_memory.return_value": 300,
            }
        ),
    )


@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize(("capacity", "budget"), [(None, 950), (2000, 950), (500, 475)])
def test_metals_budget_is_a_part_of_its_capacity(capacity, budget):
    assert memory_of(torch.device("mps"), capacity_bytes=capacity).budget_bytes(0.05) == budget


def test_metals_peak_is_what_the_driver_has_given(metal):
    memory = memory_of(torch.device("mps"))
    with memory.measure(950) as peak:
        metal.empty_cache.assert_called_once_with()
    metal.synchronize.assert_called_once_with()
    assert peak.allocated_bytes == peak.reserved_bytes == memory.peak_bytes() == 400


@pytest.mark.parametrize(("allocated", "is_short"), [(300, False), (901, True)])
def test_metal_is_short_with_less_than_a_tenth_left(metal, allocated, is_short):
    metal.current_allocated_memory.return_value = allocated
    assert memory_of(torch.device("mps")).is_short() is is_short
