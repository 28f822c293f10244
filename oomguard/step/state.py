"""
Find what a step can change, save it off the device, and put it back.

A step reaches its model and optimizer through its closure, its defaults, the
globals that its code names, the object it is bound to and its arguments. One
walk from there meets every tensor and every container that the step can write,
so that one rule restores all of them: containers get the entries back that they
had, tensors the values. An optimizer's state that was empty is empty again,
since its dictionary is one of the containers.
"""

from __future__ import annotations

import dis
import functools
import inspect
import io
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from oomguard.memory.storages import beside_the_device

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, range, slice)
_CONTAINERS = (dict, list, set, deque, tuple)
STATEFUL = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_MODULE_OWN = frozenset(vars(nn.Module()))
_NUMBERS = (int, float, str)
_MISSING = object()


@dataclass
class Found:
    """What one walk has met, each thing once and in the order of the walk."""

    tensors: dict[torch.Tensor, str] = field(default_factory=dict)
    containers: list[tuple[str, Any, object]] = field(default_factory=list)  # name, container, owner
    cells: list[tuple[str, types.CellType]] = field(default_factory=list)
    globals: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)  # name, table, key
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)  # of random numbers: PyTorch's, Python's, NumPy's
    arrays: list[tuple[str, Any]] = field(default_factory=list)  # NumPy's
    outermost: list[tuple[str, object]] = field(default_factory=list)  # what a report names
    iterators: list[str] = field(default_factory=list)  # what is taken from them can't be put back
    draws_python: bool = False  # the code names the generators of Python or NumPy
    sets_modes: bool = False  # the code names `train` or `eval`
    stores: set[str] = field(default_factory=set)  # attributes that the code sets

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The leaves that gradients are gathered for; a frozen one may be thawed later."""
        return [t for t in self.tensors if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter))]

    @functools.cached_property
    def devices(self) -> list[torch.device]:
        """The accelerators that hold a tensor of the step's state, in the order met."""
        return list(dict.fromkeys(t.device for t in self.tensors if t.device.type not in ("cpu", "meta")))

    def norm_buffers(self) -> list[torch.Tensor]:
        """The running statistics of normalisation layers; their kernels write them without a trace in `_version`."""
        norms = (m for _, m in self.modules if getattr(m, "track_running_stats", False))
        return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def rebound(self) -> list[tuple[dict[str, Any], str]]:
        """The places of modules where calls may put something else: a counter, a hidden state, a running centre."""
        places: list[tuple[dict[str, Any], str]] = []
        for _, module in self.modules:
            tables: tuple[dict[str, Any], ...] = (module._buffers, module._parameters, vars(module))
            own = set(_stores(type(module)))  # type: ignore[arg-type] # a class is hashable
            own |= {name for name in self.stores if any(name in table for table in tables)}
            places += [(next((table for table in tables if name in table), vars(module)), name) for name in own]
        return places

    def kept_tensors(self) -> list[tuple[str, dict[str, Any], str, list[torch.Tensor]]]:
        """Return where modules keep tensors that are no parameters: name, table, key, and the tensors there now."""
        found = []
        for name, module in self.modules:
            for table in (module._buffers, vars(module)):
                for key, value in table.items():
                    if key not in _MODULE_OWN and isinstance(value, torch.Tensor | list | tuple):
                        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                        found += [(f"{name}.{key}", table, key, tensors)] * bool(tensors)
        return found

    def kept(self) -> list[tuple[str, Any, object]]:
        """What modules of the user's own keep beside their tables: lists, dictionaries and the like."""
        apart = {id(vars(module)) for _, module in self.modules}
        apart |= {id(vars(module).get(name)) for _, module in self.modules for name in _MODULE_OWN}
        return [
            (name, container, owner)
            for name, container, owner in self.containers
            if isinstance(owner, nn.Module) and id(container) not in apart and _top(_module_of(owner)) != "torch"
        ]

    def names(self) -> tuple[str, ...]:
        """One line for each thing found, as a report prints it."""
        lines = [f"{name} ({_kind(thing)})" for name, thing in self.outermost]
        return (*lines, "random state")


def _kind(thing: object) -> str:
    if isinstance(thing, torch.Tensor):
        return f"tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, nn.Module):
        count = sum(1 for _ in thing.parameters()) + sum(1 for _ in thing.buffers())
        return f"{type(thing).__name__}, {count} tensors"
    return type(thing).__name__


def find_state(function: Callable[..., Any], extra: object = None, arguments: Iterable[object] = ()) -> Found:
    """
    Return what *function* can change.

    Objects of other libraries are entered only where they hold training state (a
    module, an optimizer, a scheduler, a scaler, or anything with `state_dict` and
    `load_state_dict`); a progress bar or a logger is left alone. Data sets and
    loaders are never entered.

    Args:
        function: The user's step: a function, method, partial or callable object.
        extra: More state, for what can't be reached from the code: one object, or a
            sequence or mapping of objects.
        arguments: The arguments of a call that are not its batch.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> def step(x):
        ...     return model(x).mean()
        >>> find_state(step).names()
        ('model (Linear, 2 tensors)', 'random state')
    """
    walk = _Walk(function)
    walk.function(function)
    if isinstance(extra, Mapping):
        walk.items(extra.items(), prefix="")
    elif isinstance(extra, list | tuple | set):
        walk.items(((f"state[{i}]", thing) for i, thing in enumerate(extra)), prefix="")
    elif extra is not None:
        walk.value(extra, "state")
    for i, argument in enumerate(arguments):
        walk.value(argument, f"argument {i}")
    return walk.found


class _Walk:
    """Visit everything reachable once; `found` is the result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.found = Found()
        self._seen: set[int] = {id(self.found)}
        self._alive: list[object] = []  # an id is only unique while its object lives
        self._package = _top(_module_of(_unwrap(function)))
        self._depth = 0  # how many things with a name in the report we are inside of

    def value(self, value: object, name: str, owner: object = None) -> None:
        if isinstance(value, (*_PLAIN, types.ModuleType)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            self.found.tensors[value] = name
            self._note(name, value)
            if value.is_leaf and value.grad is not None:
                self.value(value.grad, f"{name}.grad")
        elif isinstance(value, torch.Generator | random.Random) or hasattr(type(value), "bit_generator"):
            self.found.generators.append(value)
        elif type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            self.found.arrays.append((name, value))
        elif isinstance(value, _CONTAINERS):
            self._container(value, name, owner)
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self.found.iterators.append(name)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial) or _is_wrapper(value):
            if self._is_own(_module_of(_unwrap(value))):
                self.function(value)
        elif self._enters(value):
            self._object(value, name)

    def items(self, entries: Iterable[tuple[object, object]], prefix: str, owner: object = None) -> None:
        for key, value in list(entries):
            self.value(value, f"{prefix}{self._label(key)}", owner)

    def _label(self, key: object) -> object:
        """Return what stands for *key* in a name; printing a tensor would compute on its device."""
        if isinstance(key, torch.Tensor):
            return self.found.tensors.get(key, "tensor")
        return key if isinstance(key, _PLAIN) else type(key).__name__

    def function(self, function: Any) -> None:
        """Follow what the code of *function*, and of what it wraps, can reach."""
        for layer in _layers(function):
            bound = getattr(layer, "__self__", None)
            if bound is not None and not isinstance(bound, types.ModuleType | type):
                self.value(bound, "self")
            if isinstance(layer, functools.partial):
                self.items(enumerate(layer.args), "argument ")
                self.items(layer.keywords.items(), "")
            elif isinstance(layer, types.FunctionType):
                self._code(layer)
            elif not isinstance(layer, types.MethodType | types.BuiltinFunctionType | type) and not _is_wrapper(layer):
                self.value(layer, "self")  # a callable object
                self._method(layer, "__call__")

    def _code(self, function: types.FunctionType) -> None:
        self._seen.add(id(function))
        names, attributes = _names_in(function.__code__)
        self.found.stores |= _stored(function.__code__)
        self.found.sets_modes |= not {"train", "eval"}.isdisjoint(attributes)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen and content_of(cell) is not _MISSING:
                self._seen.add(id(cell))
                self.found.cells.append((name, cell))
                self._reach(cell.cell_contents, name, attributes)
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
        self.items(((p.name, p.default) for p in parameters if p.default is not p.empty), "")
        for name in names:
            value = function.__globals__.get(name, _MISSING)
            if value is not _MISSING:
                if not isinstance(value, types.FunctionType | types.ModuleType | type):
                    self.found.globals.append((name, function.__globals__, name))
                self._reach(value, name, attributes)

    def _reach(self, value: object, name: str, attributes: list[str]) -> None:
        """Visit what a name in some code stands for; of a module, the *attributes* that the code names."""
        if not isinstance(value, types.ModuleType):
            self.value(value, name)
            return
        self.found.draws_python |= value.__name__ in ("random", "numpy", "numpy.random")
        if self._is_own(value.__name__):
            for key in [key for key in attributes if key in vars(value)]:
                self.found.globals.append((f"{name}.{key}", vars(value), key))
                self.value(vars(value)[key], f"{name}.{key}")

    def _method(self, thing: object, name: str) -> None:
        method = getattr(type(thing), name, None)
        if isinstance(method, types.FunctionType) and self._is_own(method.__module__):
            self.function(method)

    def _container(self, value: Any, name: str, owner: object) -> None:
        if not isinstance(value, tuple):
            self.found.containers.append((name, value, owner))
        if isinstance(value, dict):
            for key in list(value):
                if isinstance(key, torch.Tensor):  # an optimizer's state is keyed by its parameters
                    self.value(key, f"{name}.parameter")
            self.items(value.items(), f"{name}.", owner)
        else:
            self.items(enumerate(value), f"{name}.", owner)

    def _enters(self, value: object) -> bool:
        if isinstance(value, torch.utils.data.Dataset | torch.utils.data.DataLoader) or not hasattr(value, "__dict__"):
            return False
        stateful = isinstance(value, STATEFUL) or (
            callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        )
        return stateful or self._is_own(type(value).__module__)

    def _is_own(self, module: str) -> bool:
        """Tell whether *module* is the user's: his package, or one that is not installed as a library."""
        return _top(module) == self._package or not _is_library(_top(module))

    def _object(self, value: Any, name: str) -> None:
        found = self.found
        if isinstance(value, nn.Module):
            found.modules.append((name, value))
            self._method(value, "forward")
        elif isinstance(value, Optimizer):
            found.optimizers.append(value)
        elif isinstance(value, LRScheduler):
            found.schedulers.append(value)
        elif isinstance(value, torch.amp.GradScaler):
            found.scalers.append(value)
        named = isinstance(value, STATEFUL) or callable(getattr(value, "state_dict", None))
        if named and not (isinstance(value, nn.Module) and not value.state_dict(keep_vars=True)):
            self._note(name, value)
        self._depth += named
        attributes = vars(value)
        self._seen.add(id(attributes))
        found.containers.append((name, attributes, value))
        for key, entry in list(attributes.items()):
            if isinstance(value, nn.Module) and key in _MODULE_TABLES:
                found.containers.append((name, entry, value))
                self._seen.add(id(entry))
                self._alive.append(entry)
                for own, tensor in entry.items():  # a parameter is called by its module, not by an optimizer's group
                    if isinstance(tensor, torch.Tensor) and tensor in found.tensors:
                        found.tensors[tensor] = f"{name}.{own}"
                self.items(entry.items(), f"{name}.")
            else:
                self.value(entry, f"{name}.{key}", value)
        self._depth -= named

    def _note(self, name: str, value: object) -> None:
        if self._depth == 0:
            self.found.outermost.append((name, value))


def _is_wrapper(value: object) -> bool:
    return callable(value) and isinstance(getattr(value, "__wrapped__", None), types.FunctionType | types.MethodType)


def _layers(function: Any) -> Iterator[Any]:
    """Yield *function* and what it wraps: by partial, as a method, by a decorator, by the compiler."""
    while True:
        yield function
        names = (
            ("func",)
            if isinstance(function, functools.partial)
            else ("__func__", "_torchdynamo_orig_callable", "__wrapped__")
        )
        inner = next((thing for name in names if callable(thing := getattr(function, name, None))), None)
        if inner is None:
            return
        function = inner


def _unwrap(function: Any) -> Any:
    return list(_layers(function))[-1]


def _module_of(thing: object) -> str:
    return getattr(thing, "__module__", None) or type(thing).__module__


def _top(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def _is_library(package: str) -> bool:
    if package in sys.stdlib_module_names and package != "__main__":
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package == "oomguard" or "site-packages" in file or "dist-packages" in file


def _names_in(code: types.CodeType) -> tuple[list[str], list[str]]:
    """Return the globals and the attributes that *code*, and the functions defined in it, look up."""
    names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            names[instruction.argval] = None
        elif "ATTR" in instruction.opname or "METHOD" in instruction.opname:
            attributes[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            names.update(dict.fromkeys(inner[0]))
            attributes.update(dict.fromkeys(inner[1]))
    return list(names), list(attributes)


def _stored(code: types.CodeType) -> set[str]:
    """Return the attributes that *code*, and the functions defined in it, set."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "STORE_ATTR"}
    return names.union(*(_stored(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)))


@functools.cache
def _stores(cls: type) -> frozenset[str]:
    """Return the attributes that methods of *cls* set once an object is made."""
    names: set[str] = set()
    for base in cls.__mro__:
        if _top(base.__module__) not in ("torch", "builtins"):
            methods = [_unwrap(method) for name, method in vars(base).items() if name != "__init__"]
            names |= set().union(*(_stored(m.__code__) for m in methods if isinstance(m, types.FunctionType)))
    return frozenset(names)


def content_of(cell: types.CellType) -> object:
    """Return what a closure's *cell* holds, or a mark that it holds nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


@dataclass
class _SavedTensor:
    tensor: torch.Tensor
    name: str
    version: int
    requires_grad: bool
    gradient: torch.Tensor | None
    copy: torch.Tensor | None  # on the host


class Saved:
    """
    The state that a walk has found, as it was when this was made.

    Args:
        found: What to save.
        values: Copy the tensors' values to host memory. Without it only
            containers are kept, and versions, which tell what was written.
    """

    def __init__(self, found: Found, *, values: bool = True) -> None:
        self.found = found
        self.values = values
        with beside_the_device():
            self._tensors = [_save_tensor(tensor, name, values=values) for tensor, name in found.tensors.items()]
        self._containers = [(name, c, owner, entries_of(c)) for name, c, owner in found.containers]
        self._cells = [(name, cell, content_of(cell)) for name, cell in found.cells]
        self._globals = [(name, table, key, table.get(key, _MISSING)) for name, table, key in found.globals]
        self._arrays = [(name, array, array.copy()) for name, array in found.arrays]
        self._random = RandomState(found)

    def restore(self) -> None:
        """Put everything back; what did not exist when this was made is dropped."""
        for _, table, key, value in self._globals:
            if table.get(key, _MISSING) is not value:
                table[key] = value
        for _, cell, value in self._cells:
            if content_of(cell) is not value:
                cell.cell_contents = value
        for _, container, _, entries in self._containers:
            if not same_entries(entries, entries_of(container)):
                refill(container, entries)
        for saved in self._tensors:
            _restore_tensor(saved)
        for _, array, copied in self._arrays:
            array[...] = copied
        self._random.restore()

    def changes(self, *, ignore: Iterable[torch.Tensor] = ()) -> list[str]:
        """
        Name what is no longer as it was, except for what may change in every piece.

        A module that keeps a tensor for later inspection (an attention map) and the
        private flags of PyTorch's own objects are not counted: no update depends on
        them. Values that are equal to the old ones are no change either.
        """
        ignored = {id(tensor) for tensor in ignore}
        changed = [name for name, table, key, value in self._globals if _differs(table.get(key, _MISSING), value)]
        changed += [name for name, cell, value in self._cells if _differs(content_of(cell), value)]
        for name, container, owner, entries in self._containers:
            now = entries_of(container)
            if not same_entries(entries, now):
                changed += _changed_entries(name, owner, entries, now)
        changed += [name for name, array, copied in self._arrays if array.tobytes() != copied.tobytes()]
        changed += [
            saved.name
            for saved in self._tensors
            if saved.tensor._version != saved.version and id(saved.tensor) not in ignored
        ]
        return list(dict.fromkeys(changed))


def _save_tensor(tensor: torch.Tensor, name: str, *, values: bool) -> _SavedTensor:
    copied = tensor.detach().to("cpu", copy=True) if values and tensor.device.type != "meta" else None
    gradient = tensor.grad if tensor.is_leaf else None
    return _SavedTensor(tensor, name, tensor._version, tensor.requires_grad, gradient, copied)


def _restore_tensor(saved: _SavedTensor) -> None:
    tensor = saved.tensor
    if saved.copy is not None and (tensor.is_leaf or tensor._version != saved.version):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if tensor.shape != saved.copy.shape:
                tensor.resize_(saved.copy.shape)
            tensor.copy_(saved.copy)
    if tensor.is_leaf:
        if tensor.requires_grad != saved.requires_grad:
            tensor.requires_grad_(saved.requires_grad)
        if tensor.grad is not saved.gradient:
            tensor.grad = saved.gradient


def entries_of(container: Any) -> list[Any]:
    """Return what *container* holds: its items if it is a dictionary, else its elements."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def same_entries(before: list[Any], now: list[Any]) -> bool:
    """Tell whether two results of `entries_of` hold the same objects in the same order."""
    return len(before) == len(now) and all(
        a is b or (_is_pair(a) and _is_pair(b) and a[0] is b[0] and a[1] is b[1])
        for a, b in zip(before, now, strict=True)
    )


def _is_pair(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2  # noqa: PLR2004 - a key and its value


def refill(container: Any, entries: list[Any]) -> None:
    """Make *container* hold *entries* and nothing else."""
    container.clear()
    if isinstance(container, dict | set):
        container.update(entries)
    else:
        container.extend(entries)


def _differs(now: object, before: object) -> bool:
    if now is before:
        return False
    return not (isinstance(now, _PLAIN) and type(now) is type(before) and now == before)


def _changed_entries(name: str, owner: object, before: list[Any], now: list[Any]) -> list[str]:
    if not all(map(_is_pair, (*before, *now))):
        return [name]
    old, new = dict(before), dict(now)
    keys = [k for k in {**old, **new} if _differs(new.get(k, _MISSING), old.get(k, _MISSING))]
    if isinstance(owner, nn.Module):  # every piece sets the same mode
        keys = [k for k in keys if isinstance(new.get(k), _NUMBERS) and k != "training"]
    elif isinstance(owner, STATEFUL):
        keys = [k for k in keys if isinstance(new.get(k), int | float) and not isinstance(new.get(k), bool)]
    return [f"{name}.{key}" for key in keys]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


class RandomState:
    """The states of the random number generators that a step can draw from."""

    __slots__ = ("_devices", "_generators", "_numpy", "_python", "_torch")

    def __init__(self, found: Found, *, python: bool = True) -> None:
        self._torch = torch.default_generator.get_state()
        self._devices: list[tuple[Any, torch.device, torch.Tensor]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._python = self._numpy = None
        for device in found.devices:
            module = torch.get_device_module(device)
            self._devices.append((module, device, module.get_rng_state(device)))
        for generator in found.generators:
            self._generators.append((generator, _state_of(generator)))
        if python:
            self._python = random.getstate()
            numpy = sys.modules.get("numpy")
            self._numpy = (numpy.random, numpy.random.get_state()) if numpy else None

    def restore(self) -> None:
        """Put all generators back."""
        torch.default_generator.set_state(self._torch)
        for module, device, state in self._devices:
            module.set_rng_state(state, device)
        for generator, state in self._generators:
            if isinstance(generator, torch.Generator):
                generator.set_state(state)
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.bit_generator.state = state
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            self._numpy[0].set_state(self._numpy[1])
