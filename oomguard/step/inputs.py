"""
The batch of a step: declared, made up, read from a call, cut into pieces, and put together again.

With declared inputs the declaration says where the batch is. Without (a function
run through `Guard.run`), every tensor with at least one dimension holds it in
its first.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomguard.errors import InputError
from oomguard.step.call import Shapes


@dataclass(frozen=True, init=False)
class Input:
    """
    One input of a step: what a tensor of it looks like, without the batch dimension.

    Args:
        *shape: The shape of one item, such as `3, 224, 224`; empty for one number an item.
        dtype: Of the tensor. Whole numbers without *high* are all *low*, which is
            always a legal index; floats without *high* are standard normal.
        low: The least value, included.
        high: The greatest value, not included; None: see *dtype*.
        batch_dim: Where the batch dimension stands, from 0 to the number of other dimensions.
        make: `make(batch_size, device)` returns the dummy data instead: a tensor, or
            a list or tuple with one entry an item.

    Raises:
        TypeError: The shape is not whole numbers, *dtype* is none, or *make* can't be called.
        ValueError: A number is out of range, or *make* stands beside a shape.

    Example:
        >>> Input(3, 224, 224)
        Input(shape=(3, 224, 224), dtype=torch.float32, low=0, high=None, batch_dim=0, make=None)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float
    high: float | None
    batch_dim: int
    make: Callable[[int, torch.device], Any] | None

    def __init__(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        low: float = 0,
        high: float | None = None,
        batch_dim: int = 0,
        make: Callable[[int, torch.device], Any] | None = None,
    ) -> None:
        for size in shape:
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(
                    f"oomguard: Input takes the sizes of one item one by one, like Input(3, 224, 224), not {size!r}"
                )
            if size < 0:
                raise ValueError(f"oomguard: Input got the size {size}; sizes are at least 0")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"oomguard: dtype must be a torch.dtype such as torch.float32, got {dtype!r}")
        if high is not None and not high > low:
            raise ValueError(f"oomguard: high must be greater than low={low!r}, got {high!r}")
        last = len(shape) if make is None else 64  # only `make` knows how many dimensions it makes
        if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or not 0 <= batch_dim <= last:
            raise ValueError(f"oomguard: batch_dim must be from 0 to {last} for {shape}, got {batch_dim!r}")
        if make is not None and not callable(make):
            raise TypeError(f"oomguard: make must be a function of the batch size and the device, got {make!r}")
        if make is not None and shape:
            raise ValueError(f"oomguard: make says what the data is; it can't stand beside the shape {shape}")
        for name, value in (
            ("shape", shape),
            ("dtype", dtype),
            ("low", low),
            ("high", high),
            ("batch_dim", batch_dim),
            ("make", make),
        ):
            object.__setattr__(self, name, value)


# Declarations


def check_declared(inputs: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """
    Raise where *inputs* can't be the batch of *function*.

    The first parameter of a function in a class body, `self` or `cls`, needs no declaration.

    Raises:
        InputError: A name is no parameter, a required parameter is not declared, or
            a declaration is not an `Input`.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not isinstance(inputs, Mapping) or not inputs:
        raise InputError(
            f"oomguard: inputs must map the arguments of {name} that hold the batch to Input(...), got {inputs!r}"
        )
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise InputError(f"oomguard: {name} is a generator or coroutine function: calling it runs nothing of it")
    for key, declared in inputs.items():
        for path, leaf in _declared_leaves(declared, str(key)):
            if not isinstance(leaf, Input):
                raise InputError(
                    f"oomguard: inputs[{path!r}] must be an Input, or mappings, lists and tuples of them, got {leaf!r}"
                )
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for key in inputs:
        if key not in named and not takes_any:
            raise InputError(
                f"oomguard: {name} has no argument {key!r}; its arguments are {', '.join(named) or 'none'}"
            )
    for position, parameter_name in enumerate(named):
        parameter = parameters[parameter_name]
        is_self = position == 0 and parameter_name in ("self", "cls")
        if parameter.default is parameter.empty and parameter_name not in inputs and not is_self:
            raise InputError(
                f"oomguard: {name} needs {parameter_name!r}, which inputs does not declare: declare it as Input(...), "
                "give it a default, or take it from outside the function"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter_name in inputs:
            raise InputError(f"oomguard: {name} takes {parameter_name!r} by position only; let it be passed by name")


def _declared_leaves(declared: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(declared, Mapping):
        for key, entry in declared.items():
            yield from _declared_leaves(entry, f"{path}.{key}")
    elif isinstance(declared, list | tuple):
        for i, entry in enumerate(declared):
            yield from _declared_leaves(entry, f"{path}.{i}")
    else:
        yield path, declared


def make_dummy(inputs: Mapping[str, Any], batch_size: int, device: torch.device) -> dict[str, Any]:
    """
    Make a batch of *batch_size* items that looks like *inputs*.

    Raises:
        InputError: What `make` returns has another batch size, or none.

    Example:
        >>> batch = make_dummy({"x": Input(3), "y": Input(dtype=torch.long, high=10)}, 2, torch.device("cpu"))
        >>> batch["x"].shape, batch["y"].shape
        (torch.Size([2, 3]), torch.Size([2]))
    """
    return {name: _make_nested(declared, batch_size, device, name) for name, declared in inputs.items()}


def _make_nested(declared: Any, batch_size: int, device: torch.device, path: str) -> Any:
    if isinstance(declared, Input):
        return _make_leaf(declared, batch_size, device, path)
    if isinstance(declared, Mapping):
        return {key: _make_nested(entry, batch_size, device, f"{path}.{key}") for key, entry in declared.items()}
    return _rebuild(
        declared, [_make_nested(entry, batch_size, device, f"{path}.{i}") for i, entry in enumerate(declared)]
    )


def _make_leaf(declared: Input, batch_size: int, device: torch.device, path: str) -> Any:
    if declared.make is not None:
        made = declared.make(batch_size, device)
        size = _size_at(made, declared.batch_dim)
        if size != batch_size:
            seen = f"a batch of {size}" if size is not None else f"a {type(made).__name__} without a batch dimension"
            if isinstance(made, torch.Tensor):
                seen += f" (shape {tuple(made.shape)})"
            raise InputError(
                f"oomguard: make of input {path!r} was asked for {batch_size} items and returned {seen}; "
                "it has to return exactly the items asked for"
            )
        return made
    shape = (*declared.shape[: declared.batch_dim], batch_size, *declared.shape[declared.batch_dim :])
    dtype, low, high = declared.dtype, declared.low, declared.high
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        if high is None:
            return torch.full(shape, int(low), dtype=dtype, device=device)
        return torch.randint(int(low), int(high), shape, device=device, dtype=torch.int64).to(dtype)
    drawn = dtype if dtype.is_complex or dtype.itemsize > 1 else torch.float32  # nothing draws in 8 bits
    if high is None:
        return torch.randn(shape, dtype=drawn, device=device).to(dtype)
    return torch.rand(shape, dtype=drawn, device=device).mul_(high - low).add_(low).to(dtype)


# A call's batch


@dataclass(frozen=True)
class _Leaf:
    """Where one part of the batch is in a call: a tensor's dimension, or a list."""

    path: str
    value: Any
    batch_dim: int

    @property
    def size(self) -> int:
        return _size_at(self.value, self.batch_dim) or 0

    def cut(self, start: int, length: int) -> Any:
        if isinstance(self.value, torch.Tensor):
            return self.value.narrow(self.batch_dim, start, length)
        return self.value[start : start + length]


@dataclass(frozen=True)
class Batch:
    """
    The batch of one call.

    Attributes:
        size: Items.
        shapes: The shape of one item of each tensor; lists have none.
        device: Where the first tensor is.
    """

    size: int
    shapes: Shapes
    device: torch.device
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]
    _leaves: dict[int, _Leaf]

    def pieces(self, sizes: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the arguments and keyword arguments of pieces of *sizes*, cut from the original; tensors are views."""
        start = 0
        for size in sizes:
            args = tuple(self._cut(value, start, size) for value in self._args)
            yield args, {name: self._cut(value, start, size) for name, value in self._kwargs.items()}
            start += size

    def _cut(self, value: Any, start: int, size: int) -> Any:
        leaf = self._leaves.get(id(value))
        if leaf is not None:
            return leaf.cut(start, size)
        entries = _entries(value)
        if entries is None:
            return value
        cut = [self._cut(entry, start, size) for _, entry in entries]
        return value if all(new is old for new, (_, old) in zip(cut, entries, strict=True)) else _rebuild(value, cut)


def read_batch(
    function: Callable[..., Any],
    inputs: Mapping[str, Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Batch:
    """
    Read the batch of the call `function(*args, **kwargs)`.

    Args:
        function: The step, bound if it is a method.
        inputs: Its declared inputs; None: every tensor with a dimension, and every
            list as long as their batch, is batch.
        args: The arguments of the call.
        kwargs: Its keyword arguments.

    Raises:
        InputError: There is no batch, it is empty, its parts have different sizes, or
            a part can't be split.
    """
    arguments = _named(function, args, kwargs)
    leaves = list(_undeclared(arguments)) if inputs is None else list(_declared(inputs, arguments))
    tensors = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    if not leaves:
        raise InputError(
            f"oomguard: the call of {_name(function)} has no batch: no tensor with a dimension is among its arguments "
            f"({', '.join(arguments) or 'none'})"
        )
    first = leaves[0]
    for leaf in leaves:
        if leaf.size != first.size:
            raise InputError(
                f"oomguard: inputs of one call have different batch sizes: {first.path!r} has {first.size}, "
                f"{leaf.path!r} has {leaf.size}. A tensor that is not part of the batch is better kept out of the "
                "arguments, or the batch declared with @fit_batch(inputs=...)"
            )
    if first.size == 0:
        raise InputError(f"oomguard: {first.path!r} is a batch of 0 items; a batch has at least 1")
    shapes = tuple(
        tuple(n for i, n in enumerate(leaf.value.shape) if i != leaf.batch_dim)
        for leaf in leaves
        if isinstance(leaf.value, torch.Tensor)
    )
    device = tensors[0].device if tensors else torch.device("cpu")
    return Batch(first.size, shapes, device, args, kwargs, {id(leaf.value): leaf for leaf in leaves})


def _declared(inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Iterator[_Leaf]:
    for name, declared in inputs.items():
        if name in arguments:  # else it has a default
            yield from _declared_part(declared, arguments[name], name)
    sizes = {_size_at(arguments[n], d.batch_dim) for n, d in inputs.items() if isinstance(d, Input) and n in arguments}
    for name, value in arguments.items():
        if name not in inputs and isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] in sizes:
            raise InputError(
                f"oomguard: {name!r} is a tensor as long as the batch ({value.shape[0]}) and is not declared: declare "
                "it as Input(...) if it belongs to the batch, or take it from outside the function if not"
            )


def _declared_part(declared: Any, value: Any, path: str) -> Iterator[_Leaf]:
    if isinstance(declared, Input):
        if _size_at(value, declared.batch_dim) is None:
            raise InputError(
                f"oomguard: input {path!r} is a {type(value).__name__} without a batch dimension; a batch is a tensor "
                f"of more than {declared.batch_dim} dimensions, or a list or tuple of items"
            )
        yield _Leaf(path, value, declared.batch_dim)
        return
    expected = dict(declared.items() if isinstance(declared, Mapping) else enumerate(declared))
    entries = _entries(value)
    found = None if entries is None else dict(entries)
    if found is None or not expected.keys() <= found.keys():
        raise InputError(
            f"oomguard: input {path!r} was declared with {', '.join(map(str, expected))} and is "
            f"{type(value).__name__}{'' if found is None else ' with ' + ', '.join(map(str, found))}"
        )
    for key, entry in found.items():
        if key in expected:
            yield from _declared_part(expected[key], entry, f"{path}.{key}")
        elif isinstance(entry, torch.Tensor) and entry.dim() > 0:
            raise InputError(f"oomguard: {path}.{key} is a tensor and is not declared; declare it as Input(...)")


def _undeclared(arguments: Mapping[str, Any]) -> Iterator[_Leaf]:
    parts = [part for name, value in arguments.items() for part in _parts(value, name)]
    tensors = [(path, value) for path, value in parts if isinstance(value, torch.Tensor)]
    for path, value in tensors:
        yield _Leaf(path, value, 0)
    size = tensors[0][1].shape[0] if tensors else None
    for path, value in parts:
        if isinstance(value, torch.Tensor):
            continue
        if len(value) != size:
            raise InputError(
                f"oomguard: {path!r} is a {type(value).__name__} of {len(value)} entries beside a batch of {size}, and "
                "can't be split; declare the batch with @fit_batch(inputs=...), or keep it out of the arguments"
            )
        yield _Leaf(path, value, 0)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors with a dimension, and the lists of other things, in *value*."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            yield path, value
    elif isinstance(value, torch.nn.utils.rnn.PackedSequence):
        raise InputError(f"oomguard: {path!r} is a PackedSequence, which can't be split; pack it inside the step")
    elif isinstance(value, Iterator):
        raise InputError(
            f"oomguard: {path!r} is an iterator ({type(value).__name__}): what one attempt takes from it is gone for "
            "the next. Pass the batch itself"
        )
    elif isinstance(value, list | tuple) and value and not _is_named(value) and not any(map(_is_nested, value)):
        yield path, value
    else:
        for key, entry in _entries(value) or ():
            yield from _parts(entry, f"{path}.{key}")


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; extra positional ones by `*args[i]`."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
        kinds = inspect.signature(function).parameters
    except (
        TypeError,
        ValueError,
    ):  # a built-in function without a signature, or a call that will fail by itself
        return {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if kinds[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kinds[name].kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}[{i}]": entry for i, entry in enumerate(value)}
        else:
            named[name] = value
    return named


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _size_at(value: Any, batch_dim: int) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.shape[batch_dim] if value.dim() > batch_dim else None
    return len(value) if isinstance(value, list | tuple) else None


def may_hold_batch(argument: object) -> bool:
    """Tell whether *argument* is of a kind that holds tensors of a batch, and not a model or a number."""
    return isinstance(argument, torch.Tensor) or _entries(argument) is not None


def even_sizes(total: int, largest: int, smallest: int = 1) -> list[int]:
    """
    Cut *total* items into pieces of at most *largest*, as even as can be, larger ones first.

    Sizes differ by at most 1, so that a compiler sees two of them. Where no such cut
    keeps pieces at *smallest* or more, they are larger than *largest*.

    Example:
        >>> even_sizes(5, 4), even_sizes(13, 4), even_sizes(13, 2, smallest=2)
        ([3, 2], [4, 3, 3, 3], [3, 2, 2, 2, 2, 2])
    """
    count = max(1, min(-(-total // largest), total // smallest))
    return [total // count + (i < total % count) for i in range(count)]


# Results


def join_results(results: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """
    Put together what pieces returned, as the whole batch would have returned it.

    Tensors with the batch in their first dimension are concatenated. Other floating
    numbers and tensors are means (or sums) and are added by *weights*; whole numbers
    are counts and are added. Everything else must be the same in all pieces.

    Args:
        results: What each piece returned, all of the same structure.
        sizes: The items of each piece.
        weights: The share of each piece; 1 each for sums.

    Raises:
        InputError: A part differs between pieces and is neither number nor tensor.

    Example:
        >>> join_results([{"loss": 1.0, "right": 2}, {"loss": 2.0, "right": 1}], [3, 2], [0.6, 0.4])
        {'loss': 1.4, 'right': 3}

    Note:
        A tensor that is no batch but happens to be as long as every piece is
        concatenated, too.
    """
    return results[0] if len(results) == 1 else _join(results, sizes, weights, "result")


def _join(parts: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], path: str) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise _differs(path, parts)
    if isinstance(first, torch.Tensor):
        return _join_tensors(parts, sizes, weights, path)
    if isinstance(first, float):
        return sum(weight * part for weight, part in zip(weights, parts, strict=True) if weight)
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(parts)
    if isinstance(first, list) and [len(part) for part in parts] == list(sizes) and not any(map(_is_nested, first)):
        return [entry for part in parts for entry in part]
    nested = [_entries(part) for part in parts]
    if nested[0] is None:
        if any(part is not first and not _equal(part, first) for part in parts):
            raise _differs(path, parts)
        return first
    keys = [key for key, _ in nested[0]]
    if any(entries is None or [key for key, _ in entries] != keys for entries in nested):
        raise _differs(path, parts)
    columns = zip(*(([entry for _, entry in entries or ()]) for entries in nested), strict=True)
    return _rebuild(first, [_join(c, sizes, weights, f"{path}.{k}") for k, c in zip(keys, columns, strict=True)])


def _join_tensors(parts: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], path: str) -> Any:
    if all(part.dim() > 0 and part.shape[0] == size for part, size in zip(parts, sizes, strict=True)):
        return torch.cat(tuple(parts))
    if any(part.shape != parts[0].shape for part in parts):
        raise _differs(path, [tuple(part.shape) for part in parts])
    if parts[0].is_floating_point() or parts[0].is_complex():
        total: Any = sum(weight * part for weight, part in zip(weights, parts, strict=True) if weight)
        return total
    if parts[0].dtype == torch.bool:
        if any(not torch.equal(part, parts[0]) for part in parts):
            raise _differs(path, parts)
        return parts[0]
    return sum(parts[1:], parts[0])


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def _differs(path: str, parts: Sequence[Any]) -> InputError:
    shown = ", ".join(repr(part)[:60] for part in parts[:3])
    return InputError(
        f"oomguard: {path} differs between the pieces of one batch ({shown}), and there is no rule to join it. "
        "Return tensors, numbers, or what is the same in every piece"
    )


# Containers


def _is_named(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_nested(value: object) -> bool:
    return isinstance(value, torch.Tensor) or _entries(value) is not None


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the entries of a mapping, list, tuple or dataclass; None: *value* is none of them."""
    if isinstance(value, Mapping):
        return list(value.items())
    if _is_named(value):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _rebuild(like: Any, entries: list[Any]) -> Any:
    """Return a container of the type of *like* that holds *entries*."""
    if _is_named(like):
        return type(like)(*entries)
    if isinstance(like, tuple):
        return tuple(entries)
    if isinstance(like, list):
        return list(entries)
    new = copy.copy(like)
    if isinstance(like, Mapping):
        for key, entry in zip(list(like), entries, strict=True):
            new[key] = entry  # a dictionary, or a class that behaves like one
    else:
        for field, entry in zip(dataclasses.fields(like), entries, strict=True):
            object.__setattr__(new, field.name, entry)  # a frozen one, too
    return new
