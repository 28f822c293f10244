"""A device of a given size, simulated on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch

from oomguard.memory.device import available_bytes
from oomguard.memory.storages import StorageMeter
from oomguard.memory.units import format_bytes, parse_bytes


class Simulation:
    """
    A simulated device, to be entered once; made by `simulate_oom`.

    Attributes:
        capacity_bytes: What it has; None: no limit.
        live_bytes: What lives on it now.
        peak_bytes: The most that has lived at once since entry or `reset_peak`.
        allocations: How many allocations there were.
        fail_at: The allocation that fails, counted from 1; may be set while it runs.
    """

    def __init__(self, capacity_bytes: int | None, fail_at: int | None) -> None:
        self._meter = StorageMeter(capacity_bytes, fail_at=fail_at)
        self._stack: contextlib.ExitStack | None = None
        self._is_over = False

    @property
    def capacity_bytes(self) -> int | None:
        """What the device has; None: no limit."""
        return self._meter.capacity_bytes

    @property
    def live_bytes(self) -> int:
        """What lives on the device now."""
        return self._meter.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that has lived at once since entry or `reset_peak`."""
        return self._meter.peak_bytes

    @property
    def allocations(self) -> int:
        """How many allocations there were."""
        return self._meter.allocations

    @property
    def fail_at(self) -> int | None:
        """The allocation that fails, counted from 1."""
        return self._meter.fail_at

    @fail_at.setter
    def fail_at(self, value: int | None) -> None:
        self._meter.fail_at = _checked(value)

    def reset_peak(self) -> None:
        """Start measuring the peak anew, from what lives now."""
        self._meter.reset_peak()

    def __enter__(self) -> Self:
        if self._stack is not None or self._is_over:
            raise RuntimeError("oomguard: a simulated device can be entered once; call simulate_oom again for another")
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._meter)
        for owner in (
            torch.cuda,
            torch.cuda.memory,
            torch.accelerator,
            getattr(torch.accelerator, "memory", None),
        ):
            for name, answer in self._answers().items():
                if owner is not None and name in vars(owner):
                    self._stack.callback(setattr, owner, name, vars(owner)[name])
                    setattr(owner, name, answer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stack, self._stack, self._is_over = self._stack, None, True
        if stack is not None:
            stack.close()

    def _answers(self) -> dict[str, Callable[..., Any]]:
        """Return what the functions that code asks about memory answer for this device."""
        meter = self._meter

        def info(*_: Any, **__: Any) -> tuple[int, int]:
            if meter.capacity_bytes is None:  # no limit but the machine's
                free = available_bytes()
                return free, meter.live_bytes + free
            return meter.capacity_bytes - meter.live_bytes, meter.capacity_bytes

        def live(*_: Any, **__: Any) -> int:
            return meter.live_bytes

        def peak(*_: Any, **__: Any) -> int:
            return meter.peak_bytes

        def reset(*_: Any, **__: Any) -> None:
            meter.reset_peak()

        def nothing(*_: Any, **__: Any) -> None:
            return None

        def stats(*_: Any, **__: Any) -> dict[str, int]:
            known = {"current": meter.live_bytes, "peak": meter.peak_bytes}
            kinds = ("allocated", "active", "reserved", "requested")
            table = {f"{kind}_bytes.all.{when}": size for kind in kinds for when, size in known.items()}
            return {**table, "num_alloc_retries": 0, "num_ooms": 0}

        def summary(*_: Any, **__: Any) -> str:
            return f"simulated device: {format_bytes(meter.live_bytes)} of {format_bytes(info()[1])} in use"

        def properties(*_: Any, **__: Any) -> SimpleNamespace:
            return SimpleNamespace(name="simulated device", total_memory=info()[1], major=0, minor=0)

        return {
            "mem_get_info": info,
            "get_memory_info": info,
            "memory_allocated": live,
            "memory_reserved": live,
            "max_memory_allocated": peak,
            "max_memory_reserved": peak,
            "reset_peak_memory_stats": reset,
            "reset_max_memory_allocated": reset,
            "reset_accumulated_memory_stats": nothing,
            "memory_stats": stats,
            "memory_summary": summary,
            "get_device_properties": properties,
            "empty_cache": nothing,
            "synchronize": nothing,
            "ipc_collect": nothing,
        }


def simulate_oom(capacity: int | str | None = None, *, fail_at: int | None = None) -> Simulation:
    """
    Simulate a device of *capacity* bytes on the CPU.

    Inside the `with` block every CPU storage that an operation allocates, in the
    forward, the backward or the optimizer, is taken from the device; what goes over
    its capacity raises the real `torch.OutOfMemoryError` with PyTorch's own text.
    `torch.cuda.mem_get_info`, `memory_allocated`, `max_memory_allocated`,
    `empty_cache` and their like, and those of `torch.accelerator`, answer for it.

    Args:
        capacity: Bytes, as an int or a text like "64MiB"; None: no limit.
        fail_at: The allocation, counted from 1, that fails once whatever its size.

    Returns:
        The simulated device, to be entered once.

    Raises:
        ValueError: There is neither a capacity nor an allocation to fail, or one is out of range.

    Example:
        >>> with simulate_oom("1MiB") as device:
        ...     x = torch.zeros(1000)
        >>> device.peak_bytes, device.allocations
        (4000, 1)

    Note:
        Tensors that were there before are not counted: make the model inside the block
        if it should be. `torch.cuda.is_available()` goes on telling the truth, so that
        code which falls back to the CPU does. A function that was imported by its name
        before (`from torch.cuda import mem_get_info`) can't be replaced.
    """
    if capacity is None and fail_at is None:
        raise ValueError(
            "oomguard: simulate_oom needs a capacity such as '64MiB', or fail_at=n for the n-th allocation"
        )
    return Simulation(None if capacity is None else parse_bytes(capacity), _checked(fail_at))


def _checked(fail_at: int | None) -> int | None:
    if fail_at is not None and (isinstance(fail_at, bool) or not isinstance(fail_at, int) or fail_at < 1):
        raise ValueError(f"oomguard: fail_at counts allocations from 1, got {fail_at!r}")
    return fail_at
