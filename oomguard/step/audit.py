"""
Look out for what a piece must not do: write what others will read, or read what should have been updated.

The audit sees every operation of a piece, with those of its backward. Later
calls of the same step run without it, under the cheap checks alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomguard.errors import SplitError

_OURS = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))


class Refusal(SplitError):  # noqa: N818 - a reason, on its way to be an error
    """The short reason why a step can't run in pieces; whoever runs it says the rest."""


class WriteAudit(TorchDispatchMode):
    """
    Note whether any of *tensors* is written, also where `_version` does not show it (`.data`).

    Attributes:
        written: An operation has written one of them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = {_storage(tensor) for tensor in tensors}
        self.written = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.written = self.written or any(_storage(t) in self._watched for t in _written(func, args, kwargs))
        return func(*args, **kwargs)


class ReadAudit(TorchDispatchMode):
    """Note which tensors are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read: set[int] = set()

    def has_read(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Tell whether an operation has read one of *tensors*, which have been alive all the time."""
        return any(_storage(tensor) in self._read for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            self._read |= {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        return func(*args, **kwargs)


class Audit(TorchDispatchMode):
    """
    Raise `Refusal` at the operation that makes pieces differ from the whole.

    Args:
        allowed: Tensors that every piece may write (running statistics).

    Attributes:
        refusal: What was raised, for a step that catches it.
    """

    def __init__(self, allowed: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allowed = {_storage(tensor) for tensor in allowed}
        self.refusal: Refusal | None = None
        self._born: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._stale: set[int] = set()

    def held_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the update of *tensors* was held back: reading one from now on is an error."""
        self._stale |= {_storage(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {_storage(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if not func.is_view and self._stale & inputs.keys():
            self._refuse(f"it reads parameters after their update ({_where(func)})")
        for tensor in _written(func, args, kwargs):
            address = _storage(tensor)
            if address not in self._born and address not in self._allowed:
                shape = tuple(tensor.shape)
                self._refuse(f"it writes a tensor of shape {shape} that it keeps between calls ({_where(func)})")
        outputs = func(*args, **kwargs)
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in inputs:
                self._follow(tensor)
        return outputs

    def _refuse(self, reason: str) -> NoReturn:
        self.refusal = Refusal(reason)
        raise self.refusal

    def _follow(self, tensor: torch.Tensor) -> None:
        # A weak reference, since holding the storages of a whole piece would take the memory that ran out.
        address, born = _storage(tensor), self._born
        if address >= 0 and address not in born:
            born[address] = weakref.ref(tensor.untyped_storage(), lambda _: born.pop(address, None))


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that *func* writes, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have no storage of their own
        return -id(tensor)


def _where(func: Any) -> str:
    """Name the operation and the user's line that called it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            return f"{func.overloadpacket.__name__} at {file}:{frame.f_lineno}"
        frame = frame.f_back
    return str(func.overloadpacket.__name__)
