"""
Follow the storages that operations allocate on the CPU, and refuse what goes over a capacity.

PyTorch's CPU allocator keeps no statistics and knows no limit. A dispatch mode
sees every operation, those of autograd and of optimizers too; a storage that
comes out of one and did not go in was allocated by it, and a weak reference
tells when it is gone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

_active: ContextVar[StorageMeter | None] = ContextVar("oomguard_meter", default=None)

_ADVICE = (
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
_beside: ContextVar[bool] = ContextVar("oomguard_beside", default=False)


def active_meter() -> StorageMeter | None:
    """Return the innermost meter that is entered here."""
    return _active.get()


@contextlib.contextmanager
def beside_the_device() -> Iterator[None]:
    """
    Allocate without being counted, as host memory is not the device's.

    For copies that keep a state: a simulated device is the CPU, and its memory would
    otherwise be taken by them.
    """
    token = _beside.set(True)
    try:
        yield
    finally:
        _beside.reset(token)


def out_of_memory(requested_bytes: int, capacity_bytes: int, live_bytes: int) -> torch.OutOfMemoryError:
    """Return the error that PyTorch's CUDA allocator raises, in its own words."""
    live, free = _written(live_bytes), _written(max(0, capacity_bytes - live_bytes))
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {_written(requested_bytes)}. GPU 0 has a total capacity of "
        f"{_written(capacity_bytes)} of which {free} is free. Including non-PyTorch memory, this process has "
        f"{live} memory in use. Of the allocated memory {live} is allocated by PyTorch, and 0 bytes is reserved by "
        f"PyTorch but unallocated. {_ADVICE}"
    )


def not_allowed(requested_bytes: int, capacity_bytes: int, live_bytes: int) -> torch.OutOfMemoryError:
    """Return the error for what a CPU would have done and was not asked to."""
    return torch.OutOfMemoryError(
        f"CPU out of memory. Tried to allocate {_written(requested_bytes)} beside {_written(live_bytes)}, of "
        f"{_written(capacity_bytes)} that may be used."
    )


def _written(size_bytes: int) -> str:
    """Return a size as PyTorch's allocator writes it: code that reads its messages must read these."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes > factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} bytes"


class StorageMeter(TorchDispatchMode):
    """
    Count the storages that are allocated on the CPU, or another kind of device, while this is entered.

    Args:
        capacity_bytes: The most that may live at once; None: no limit.
        fail_at: The allocation, counted from 1, that fails once whatever its size.
        device_type: The kind of device whose storages are counted.
        refuse_first: Find out what an operation will allocate by running it on
            `meta` tensors, and refuse before a byte is touched. Otherwise an operation
            runs and its result is refused.

    Attributes:
        live_bytes: What lives now.
        peak_bytes: The most that has lived at once since entry or `reset_peak`.
        allocations: How many allocations were asked for.
        history: What was allocated and freed, as (action, address, size), while it is kept.

    Note:
        `torch.compile` steps aside: compiled functions run as they were written, and
        `fullgraph=True` raises. An operation of higher order (`torch.cond`) counts as
        one: its result is seen, and what lives only inside it is not. Neither is a storage
        resized by its own method, nor what other threads do.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        fail_at: int | None = None,
        refuse_first: bool = False,
        device_type: str = "cpu",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.capacity_bytes, self.fail_at, self.refuse_first = capacity_bytes, fail_at, refuse_first
        self.live_bytes = self.peak_bytes = self.allocations = 0
        self.history: list[tuple[str, int, int]] | None = None
        self._sizes: dict[int, int] = {}  # by the address of the storage
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._tokens: list[Token[StorageMeter | None]] = []

    def reset_peak(self) -> None:
        """Start measuring the peak anew, from what lives now."""
        self.peak_bytes = self.live_bytes

    def start_history(self) -> list[tuple[int, int]]:
        """Keep what is allocated and freed from now on; return what lives already, as (address, size)."""
        self.history = []
        return list(self._sizes.items())

    def stop_history(self) -> list[tuple[str, int, int]]:
        """Return what was kept."""
        kept, self.history = self.history or [], None
        return kept

    def __enter__(self) -> Self:
        self._tokens.append(_active.set(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        _active.reset(self._tokens.pop())
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # the subclass takes the operation apart, and the parts come here
        kwargs = kwargs or {}
        if _beside.get():
            return func(*args, **kwargs)
        if self.refuse_first and self.capacity_bytes is not None:
            coming = _coming_bytes(func, args, kwargs)
            if self.live_bytes + coming > self.capacity_bytes:
                raise not_allowed(coming, self.capacity_bytes, self.live_bytes)
        outputs = func(*args, **kwargs)
        if _writes_a_list(func):
            torch.autograd.graph.increment_version(args[0])
        refused = self._account(outputs, (args, kwargs))
        if refused:
            del outputs  # or the traceback would keep what was refused
            capacity = self.live_bytes if self.capacity_bytes is None else self.capacity_bytes
            raise out_of_memory(refused, capacity, self.live_bytes)
        return outputs

    def _account(self, outputs: Any, inputs: Any) -> int:
        """Count the storages of *outputs* that are not those of *inputs*; return the bytes that found no room."""
        given: set[int | None] | None = None
        for tensor in _tensors(outputs):
            address = _address(tensor, self._device_type)
            if address is None:
                continue
            size, refused = tensor.untyped_storage().nbytes(), 0
            if address in self._sizes:
                refused = self._resized(address, size)
            else:
                if given is None:
                    given = {_address(each, self._device_type) for each in _tensors(inputs)}
                if address not in given:
                    refused = self._born(tensor, address, size)
            if refused:
                return refused
        return 0

    def _born(self, tensor: torch.Tensor, address: int, size: int) -> int:
        refused = self._allocate(size)
        if not refused:

            def gone(_: object) -> None:
                size = self._sizes.pop(address, 0)
                self.live_bytes -= size
                self._references.pop(address, None)
                self._note("free_completed", address, size)

            self._references[address] = weakref.ref(tensor.untyped_storage(), gone)
            self._sizes[address] = size
            self._note("alloc", address, size)
        return refused

    def _resized(self, address: int, size: int) -> int:
        """Count what growing takes: a new block, to which the old one, alive until then, is copied."""
        old = self._sizes[address]
        refused = self._allocate(size) if size > old else 0
        if not refused and size != old:
            self.live_bytes -= old if size > old else old - size
            self._sizes[address] = size
            if size > old:  # the new block beside the old one, for a moment
                self._note("alloc", ~address, size)
                self._note("free_completed", ~address, size)
            self._note("free_completed", address, old)
            self._note("alloc", address, size)
        return refused

    def _note(self, action: str, address: int, size: int) -> None:
        if self.history is not None:
            self.history.append((action, address, size))

    def _allocate(self, size: int) -> int:
        if size == 0:
            return 0
        self.allocations += 1
        is_over = self.capacity_bytes is not None and self.live_bytes + size > self.capacity_bytes
        if is_over or self.allocations == self.fail_at:
            return size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return 0


@functools.cache
def _writes_a_list(func: Any) -> bool:
    """Tell whether *func* is an operation on a list in place: under a dispatch mode these forget to count versions."""
    name = getattr(getattr(func, "_schema", None), "name", "")
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor, device_type: str) -> int | None:
    """Return what identifies the storage of a tensor; None for one without a storage on such a device."""
    if tensor.device.type != device_type or tensor.layout is not torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


def _coming_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return how many bytes *func* will allocate on the CPU, or 0 where that can't be known before."""
    kind = _kind(func)
    device = kwargs.get("device")
    if not kind.may_allocate or (device is not None and torch.device(device).type != "cpu"):
        return 0
    given = _tensors((args, kwargs))
    if any(tensor.device.type != "cpu" for tensor in given) or not (given or kind.takes_device):
        return 0
    try:
        shadows = {id(tensor): _shadow(tensor) for tensor in given}
        before = {s._cdata: s.nbytes() for s in (shadow.untyped_storage() for shadow in shadows.values())}
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: shadows[id(tensor)], (args, kwargs))
        if kind.takes_device:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
        made = {s._cdata: s for s in (tensor.untyped_storage() for tensor in _tensors(func(*args, **kwargs)))}
        return sum(s.nbytes() for address, s in made.items() if s.nbytes() > before.get(address, 0))
    except Exception:  # noqa: BLE001 - no meta form, or a result that depends on values: counted afterwards instead
        return 0


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Kind(NamedTuple):
    may_allocate: bool  # and its schema tells how: neither a view, nor in place
    takes_device: bool


@functools.cache
def _kind(func: Any) -> _Kind:
    if not isinstance(func, torch._ops.OpOverload) or func.is_view:
        return _Kind(may_allocate=False, takes_device=False)
    arguments = func._schema.arguments
    in_place = all(result.alias_info is not None for result in func._schema.returns)
    resizes = func._schema.name == "aten::resize_" or any(argument.is_out for argument in arguments)
    return _Kind(
        may_allocate=resizes or not in_place, takes_device=any(argument.name == "device" for argument in arguments)
    )
