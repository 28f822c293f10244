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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import torch

from oomguard.memory.storages import StorageMeter, active_meter

_SHORT = 0.1  # less than this fraction of the capacity left counts as little


@dataclass
class Peak:
    """The most memory that was in use during a measurement, in bytes; filled in when it ends."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0


class DeviceMemory(Protocol):
    """What the library asks of a device."""

    device: torch.device
    capacity_bytes: int

    def budget_bytes(self, headroom: float) -> int:
        """Return how much this process may hold: what it has and what is free, less the headroom."""

    def measure(self, budget_bytes: int) -> contextlib.AbstractContextManager[Peak]:
        """Measure the peak of a block; where nothing else limits the device, refuse what goes over the budget."""

    def peak_bytes(self) -> int:
        """Return the peak so far, as an event of the guard reports it."""

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


class _Caching:
    """CUDA, ROCm and XPU: PyTorch's caching allocator keeps the statistics."""

    def __init__(self, device: torch.device, capacity_bytes: int | None) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        total = self._module.mem_get_info(device)[1]
        self.capacity_bytes: int = total if capacity_bytes is None else min(total, capacity_bytes)

    def budget_bytes(self, headroom: float) -> int:
        free = self._module.mem_get_info(self.device)[0] + self._module.memory_reserved(self.device)
        return int(min(free, self.capacity_bytes) - headroom * self.capacity_bytes)

    @contextlib.contextmanager
    def measure(self, budget_bytes: int) -> Iterator[Peak]:  # noqa: ARG002 - the device itself refuses
        peak = Peak()
        self.empty_cache()
        self._module.reset_peak_memory_stats(self.device)
        try:
            yield peak
            self._module.synchronize(self.device)
        finally:
            peak.allocated_bytes = self._module.max_memory_allocated(self.device)
            peak.reserved_bytes = self._module.max_memory_reserved(self.device)

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_reserved(self.device))

    def is_short(self) -> bool:
        free = self._module.mem_get_info(self.device)[0] + self._module.memory_reserved(self.device)
        return bool(free - self._module.memory_allocated(self.device) < _SHORT * self.capacity_bytes)

    def empty_cache(self) -> None:
        self._module.empty_cache()


class _Metal:
    """Apple's devices keep no peak: what the driver has given and not got back is the nearest."""

    def __init__(self, device: torch.device, capacity_bytes: int | None) -> None:
        self.device = device
        total = torch.mps.recommended_max_memory()
        self.capacity_bytes: int = total if capacity_bytes is None else min(total, capacity_bytes)

    def budget_bytes(self, headroom: float) -> int:
        return int((1 - headroom) * self.capacity_bytes)

    @contextlib.contextmanager
    def measure(self, budget_bytes: int) -> Iterator[Peak]:  # noqa: ARG002 - the device itself refuses
        peak = Peak()
        self.empty_cache()
        try:
            yield peak
            torch.mps.synchronize()
        finally:
            peak.allocated_bytes = peak.reserved_bytes = torch.mps.driver_allocated_memory()

    def peak_bytes(self) -> int:
        return torch.mps.driver_allocated_memory()

    def is_short(self) -> bool:
        return self.capacity_bytes - torch.mps.current_allocated_memory() < _SHORT * self.capacity_bytes

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

    def budget_bytes(self, headroom: float) -> int:
        return int((1 - headroom) * self.capacity_bytes)

    @contextlib.contextmanager
    def measure(self, budget_bytes: int) -> Iterator[Peak]:
        peak = Peak()
        if self._simulation is not None:
            self._simulation.reset_peak()
            meter: StorageMeter = self._simulation
            entered: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        else:
            # Refused before a byte is touched: a CPU that runs out raises nothing, its kernel kills.
            meter = entered = StorageMeter(max(0, budget_bytes - self._held_bytes), refuse_first=True)
        try:
            with entered:
                yield peak
        finally:
            peak.allocated_bytes = peak.reserved_bytes = self._held_bytes + meter.peak_bytes

    def peak_bytes(self) -> int:
        return self._simulation.peak_bytes if self._simulation is not None else _resident_peak_bytes()

    def is_short(self) -> bool:
        if self._simulation is not None:
            return self.capacity_bytes - self._simulation.live_bytes < _SHORT * self.capacity_bytes
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
