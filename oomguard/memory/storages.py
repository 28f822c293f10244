"""
Follow the storages that operations allocate on the CPU, and refuse what goes over a capacity.

PyTorch's CPU allocator keeps no statistics and knows no limit. A dispatch mode
sees every operation, those of autograd and of optimizers too; a storage that
comes out of one and did not go in was allocated by it, and a weak reference
tells when it is gone.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from oomguard.memory.units import format_bytes

_active: ContextVar[StorageMeter | None] = ContextVar("oomguard_meter", default=None)

_ADVICE = (
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)


def active_meter() -> StorageMeter | None:
    """Return the innermost meter that is entered here."""
    return _active.get()


def out_of_memory(requested_bytes: int, capacity_bytes: int, live_bytes: int) -> torch.OutOfMemoryError:
    """Return the error that PyTorch's CUDA allocator raises, in its own words."""
    live, free = format_bytes(live_bytes), format_bytes(max(0, capacity_bytes - live_bytes))
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {format_bytes(requested_bytes)}. GPU 0 has a total capacity of "
        f"{format_bytes(capacity_bytes)} of which {free} is free. Including non-PyTorch memory, this process has "
        f"{live} memory in use. Of the allocated memory {live} is allocated by PyTorch, and 0 bytes is reserved by "
        f"PyTorch but unallocated. {_ADVICE}"
    )


class StorageMeter(TorchDispatchMode):
    """
    Count the CPU storages that are allocated while this is entered.

    Args:
        capacity_bytes: The most that may live at once; None: no limit.
        fail_at: The allocation, counted from 1, that fails once whatever its size.
        refuse_first: Find out what an operation will allocate by running it on
            `meta` tensors, and refuse before a byte is touched. Otherwise an operation
            runs and its result is refused.

    Attributes:
        live_bytes: What lives now.
        peak_bytes: The most that has lived at once since entry or `reset_peak`.
        allocations: How many storages were allocated.
    """

    def __init__(
        self, capacity_bytes: int | None = None, *, fail_at: int | None = None, refuse_first: bool = False
    ) -> None:
        super().__init__()
        self.capacity_bytes, self.fail_at, self.refuse_first = capacity_bytes, fail_at, refuse_first
        self.live_bytes = self.peak_bytes = self.allocations = 0
        self._sizes: dict[int, int] = {}  # by the address of the storage
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._tokens: list[Token[StorageMeter | None]] = []

    def reset_peak(self) -> None:
        """Start measuring the peak anew, from what lives now."""
        self.peak_bytes = self.live_bytes

    def __enter__(self) -> StorageMeter:
        self._tokens.append(_active.set(self))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        _active.reset(self._tokens.pop())
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.refuse_first and self.capacity_bytes is not None and not func.is_view:
            coming = _coming_bytes(func, args, kwargs)
            if self.live_bytes + coming > self.capacity_bytes:
                raise out_of_memory(coming, self.capacity_bytes, self.live_bytes)
        outputs = func(*args, **kwargs)
        given: set[int] | None = None
        for tensor in _tensors(outputs):
            address = _address(tensor)
            if address is None:
                continue
            size = tensor.untyped_storage().nbytes()
            if address in self._sizes:
                if self._sizes[address] != size:  # resized in place
                    self._grow(address, size)
                continue
            if given is None:
                given = {_address(t) for t in _tensors((args, kwargs))} - {None}  # type: ignore[assignment]
            if size > 0 and address not in given:
                self._born(tensor, address, size)
        return outputs

    def _born(self, tensor: torch.Tensor, address: int, size: int) -> None:
        self.allocations += 1
        self._check(size, fails=self.allocations == self.fail_at)

        def gone(_: object) -> None:
            self.live_bytes -= self._sizes.pop(address, 0)
            self._references.pop(address, None)

        self._references[address] = weakref.ref(tensor.untyped_storage(), gone)
        self._sizes[address] = size
        self._add(size)

    def _grow(self, address: int, size: int) -> None:
        self._check(size - self._sizes[address], fails=False)
        self._add(size - self._sizes[address])
        self._sizes[address] = size

    def _check(self, size: int, *, fails: bool) -> None:
        over = self.capacity_bytes is not None and self.live_bytes + size > self.capacity_bytes
        if over or fails:
            capacity = self.live_bytes if self.capacity_bytes is None else self.capacity_bytes
            raise out_of_memory(size, capacity, self.live_bytes)

    def _add(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int | None:
    """Return what identifies the storage of a CPU tensor; None for one without a storage here."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper
        return None


def _coming_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return how many bytes *func* will allocate on the CPU, or 0 where that can't be known before."""
    if all(result.alias_info is not None for result in func._schema.returns):  # in place
        return 0
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return 0
    given = _tensors((args, kwargs))
    if any(tensor.device.type != "cpu" for tensor in given) or (not given and "device" not in _argument_names(func)):
        return 0
    try:
        shadows: dict[int, torch.Tensor] = {id(tensor): _shadow(tensor) for tensor in given}
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: shadows[id(tensor)], (args, kwargs))
        if "device" in _argument_names(func):
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
        made = {s._cdata: s for s in (t.untyped_storage() for t in _tensors(func(*args, **kwargs)))}
    except Exception:  # noqa: BLE001 - no meta form, or a result that depends on values: counted afterwards instead
        return 0
    for shadow in shadows.values():
        made.pop(shadow.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in made.values())


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _argument_names(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}
