"""
The only place that asks a device about its memory: capacity, budget, peak, cache.

Three kinds of device answer the same questions: those with PyTorch's caching
allocator (CUDA, ROCm, XPU), Apple's, and the CPU, whose allocations are
accounted by a `StorageMeter`. Inside `simulate_oom` the CPU is the simulated device.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import torch

from oomguard.memory.storages import StorageMeter, active_meter
from oomguard.memory.trace import Allocator, AllocatorHistory, StorageHistory, Trace

_SHORT = 0.1  # less than this fraction of the capacity left counts as little


class Measurement:
    """
    What was seen of a block that runs steps of one batch size; filled in when it ends.

    Attributes:
        allocated_bytes: The most that tensors took at once.
        reserved_bytes: The most that the allocator held at once.
        trace: The allocations of the steps that ended; None: not asked for, or not to be had.
    """

    def __init__(self, history: AllocatorHistory | StorageHistory | None = None, trace_size: int | None = None) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.trace: Trace | None = None
        self._history, self._trace_size = history, trace_size or 0

    def step_ended(self) -> None:
        """Note that a step has ended here."""
        if self._history is not None:
            self._history.step_ended()

    def close(self) -> None:
        """Stop recording."""
        if self._history is not None:
            self.trace = self._history.close(self._trace_size)


class DeviceMemory(Protocol):
    """What the library asks of a device."""

    device: torch.device
    capacity_bytes: int

    def budget_bytes(self, headroom: float) -> int:
        """Return how much this process may hold: what it has and what is free, less the headroom."""

    def limit_bytes(self) -> int | None:
        """Return how much the device itself would give to this process; None: it does not say."""

    def measure(
        self, budget_bytes: int, trace_size: int | None = None
    ) -> contextlib.AbstractContextManager[Measurement]:
        """
        Measure a block; where nothing else limits the device, refuse what goes over the budget.

        With a *trace_size*, what the block allocates is traced, as of a batch of so many items.
        """

    def peak_bytes(self) -> int:
        """Return the peak so far, as an event of the guard reports it."""

    def allocated_bytes(self) -> int:
        """Return what tensors take now; 0 where the device does not say."""

    def is_short(self) -> bool:
        """Tell whether little memory is left: what makes an ambiguous error look like an out-of-memory one."""

    def empty_cache(self) -> None:
        """Give back what is held for reuse."""


def memory_of(device: torch.device, *, capacity_bytes: int | None = None, held_bytes: int = 0) -> DeviceMemory:
    """
    Return the memory of *device*.

    Args:
        device: A device of this process.
        capacity_bytes: What the device is taken to have. Default: what it has; on
            a CPU what the machine, or its control group, has left.
        held_bytes: Bytes that the training state holds on a CPU already; other
            devices know it themselves.
    """
    if device.type == "cpu":
        return _Host(device, capacity_bytes, held_bytes)
    if device.type == "mps":
        return _Metal(device, capacity_bytes)
    return _Caching(device, capacity_bytes)


def computes(device: torch.device) -> bool:
    """Tell whether values on *device* mean anything: on the fake GPU of `oomguard.testing` no kernel runs."""
    return device.type != "cuda" or "OOMGUARD_FAKE_GPU_CAPACITY" not in os.environ


class _Caching:
    """CUDA, ROCm and XPU: PyTorch's caching allocator keeps the statistics."""

    def __init__(self, device: torch.device, capacity_bytes: int | None) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        total = self._module.mem_get_info(device)[1]
        self.capacity_bytes: int = total if capacity_bytes is None else min(total, capacity_bytes)

    def limit_bytes(self) -> int | None:
        return int(self._module.mem_get_info(self.device)[0] + self._module.memory_reserved(self.device))

    def budget_bytes(self, headroom: float) -> int:
        return int(min(self.limit_bytes() or 0, self.capacity_bytes) - headroom * self.capacity_bytes)

    @contextlib.contextmanager
    def measure(
        self,
        budget_bytes: int,  # noqa: ARG002 - the device itself refuses
        trace_size: int | None = None,
    ) -> Iterator[Measurement]:
        self.empty_cache()
        self._module.reset_peak_memory_stats(self.device)
        entered, history = (contextlib.nullcontext(), None) if trace_size is None else self._history()
        seen = Measurement(history, trace_size)
        try:
            with entered:
                yield seen
            self._module.synchronize(self.device)
        finally:
            seen.allocated_bytes = self._module.max_memory_allocated(self.device)
            seen.reserved_bytes = self._module.max_memory_reserved(self.device)
            seen.close()

    def _history(self) -> tuple[contextlib.AbstractContextManager[Any], AllocatorHistory | StorageHistory | None]:
        if self.device.type != "cuda":
            meter = StorageMeter(device_type=self.device.type)
            return meter, StorageHistory(meter, Allocator(), self._module.memory_reserved(self.device))
        if torch.cuda.get_allocator_backend() != "native":
            return contextlib.nullcontext(), None  # its rules are the driver's
        return contextlib.nullcontext(), AllocatorHistory(self.device)

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_reserved(self.device))

    def allocated_bytes(self) -> int:
        return int(self._module.memory_allocated(self.device))

    def is_short(self) -> bool:
        free = self._module.mem_get_info(self.device)[0] + self._module.memory_reserved(self.device)
        return bool(free - self.allocated_bytes() < _SHORT * self.capacity_bytes)

    def empty_cache(self) -> None:
        self._module.empty_cache()


class _Metal:
    """Apple's devices keep no peak: what the driver has given and not got back is the nearest."""

    def __init__(self, device: torch.device, capacity_bytes: int | None) -> None:
        self.device = device
        total = torch.mps.recommended_max_memory()
        self.capacity_bytes: int = total if capacity_bytes is None else min(total, capacity_bytes)

    def limit_bytes(self) -> int | None:
        return None

    def budget_bytes(self, headroom: float) -> int:
        return int((1 - headroom) * self.capacity_bytes)

    @contextlib.contextmanager
    def measure(
        self,
        budget_bytes: int,  # noqa: ARG002 - the device itself refuses
        trace_size: int | None = None,
    ) -> Iterator[Measurement]:
        self.empty_cache()
        meter = StorageMeter(device_type="mps")
        traced = trace_size is not None
        history = StorageHistory(meter, None, torch.mps.driver_allocated_memory()) if traced else None
        seen = Measurement(history, trace_size)
        try:
            with meter if traced else contextlib.nullcontext():
                yield seen
            torch.mps.synchronize()
        finally:
            seen.allocated_bytes = seen.reserved_bytes = torch.mps.driver_allocated_memory()
            seen.close()

    def peak_bytes(self) -> int:
        return torch.mps.driver_allocated_memory()

    def allocated_bytes(self) -> int:
        return torch.mps.current_allocated_memory()

    def is_short(self) -> bool:
        return self.capacity_bytes - self.allocated_bytes() < _SHORT * self.capacity_bytes

    def empty_cache(self) -> None:
        torch.mps.empty_cache()


class _Host:
    """The CPU, or the device that `simulate_oom` puts in its place."""

    def __init__(self, device: torch.device, capacity_bytes: int | None, held_bytes: int) -> None:
        self.device = device
        meter = active_meter()
        self._simulation = meter if meter is not None and meter.capacity_bytes is not None else None
        if self._simulation is not None and self._simulation.capacity_bytes is not None:
            self._held_bytes = 0  # the meter knows
            self.capacity_bytes = min(self._simulation.capacity_bytes, capacity_bytes or sys.maxsize)
        else:
            self._held_bytes = held_bytes
            self.capacity_bytes = capacity_bytes or held_bytes + available_bytes()

    def limit_bytes(self) -> int | None:
        return None

    def budget_bytes(self, headroom: float) -> int:
        return int((1 - headroom) * self.capacity_bytes)

    @contextlib.contextmanager
    def measure(self, budget_bytes: int, trace_size: int | None = None) -> Iterator[Measurement]:
        if self._simulation is not None:
            self._simulation.reset_peak()
            meter: StorageMeter = self._simulation
            entered: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        else:
            # Refused before a byte is touched: a CPU that runs out raises nothing, its kernel kills.
            meter = entered = StorageMeter(max(0, budget_bytes - self._held_bytes), refuse_first=True)
        history = None if trace_size is None else StorageHistory(meter, None, self._held_bytes)
        seen = Measurement(history, trace_size)
        try:
            with entered:
                yield seen
        finally:
            seen.allocated_bytes = seen.reserved_bytes = self._held_bytes + meter.peak_bytes
            seen.close()

    def peak_bytes(self) -> int:
        return self._simulation.peak_bytes if self._simulation is not None else _resident_peak_bytes()

    def allocated_bytes(self) -> int:
        return self._simulation.live_bytes if self._simulation is not None else 0

    def is_short(self) -> bool:
        if self._simulation is not None:
            return self.capacity_bytes - self.allocated_bytes() < _SHORT * self.capacity_bytes
        return available_bytes() < _SHORT * self.capacity_bytes

    def empty_cache(self) -> None:
        """Nothing is held: the CPU's allocator gives back at once."""


def _resident_peak_bytes() -> int:
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes, except on macOS


def available_bytes() -> int:
    """
    Return the bytes of host memory that this process can still take.

    That is the least of what the machine has left, what its control group leaves
    it, and what its own address-space limit allows.
    """
    return max(0, min(_machine_bytes(), _control_group_bytes(), _address_space_bytes()))


def _machine_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _table(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    raise ValueError("oomguard: this system does not tell how much memory is left; say it with capacity='8 GiB'")


class _Files(NamedTuple):
    """How one version of control groups says it."""

    folder: str  # below the root
    limit: str
    used: str
    reclaimable: str  # the row of memory.stat that is used and can be given back


_CONTROLLERS = {  # by the name that /proc/self/cgroup gives them: versions 2 and 1
    "": _Files("", "memory.max", "memory.current", "inactive_file"),
    "memory": _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _control_group_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """
    Return what the control group of this process leaves, and every group around it.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
    paths = dict.fromkeys(_CONTROLLERS, "")  # in a container the root is the own group, whatever the path says
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths.update((name, path) for name in controllers.split(",") if name in paths)
    left = sys.maxsize
    for name, files in _CONTROLLERS.items():
        group = root / files.folder
        left = min(left, _group_bytes(group, files))
        for part in PurePosixPath(paths[name].lstrip("/")).parts:
            group /= part
            left = min(left, _group_bytes(group, files))
    return left


def _group_bytes(group: Path, files: _Files) -> int:
    try:
        limit, used = int((group / files.limit).read_text()), int((group / files.used).read_text())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return sys.maxsize
    with contextlib.suppress(OSError, KeyError):
        used -= _table(group / "memory.stat")[files.reclaimable]
    return limit - used


def _address_space_bytes() -> int:
    with contextlib.suppress(ImportError, OSError, ValueError, KeyError):
        import resource  # noqa: PLC0415 - not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            return limit - _table(Path("/proc/self/status"))["VmSize:"] * 1024
    return sys.maxsize


def _table(path: Path) -> dict[str, int]:
    """Read a file of lines `name number`."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
