"""
Note before an attempt what it may leave half-done, and put that back after an OOM.

A guarded call that meets no OOM pays for this, so only what an attempt can
leave half-done is copied: random states, running statistics, the entries of
small containers, schedules. Everything else is watched: `_version` tells
whether a tensor was written, and what was written needs a full copy
(`oomguard.step.state.Saved`) or is named in the error.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from oomguard.memory.device import computes
from oomguard.memory.storages import beside_the_device
from oomguard.step.state import (
    STATEFUL,
    Found,
    RandomState,
    Saved,
    content_of,
    entries_of,
    find_state,
    refill,
    same_entries,
)

_MOVING_BYTES = 2**20  # tensors up to this size that calls write (spectral norm's vectors) are copied at every entry
_NONE: list[Any] = []
_MISSING = object()
_LEADING = (*STATEFUL, types.FunctionType, types.MethodType)  # another one of these leads to another state
_SMALL = 64  # containers up to this many entries are copied; from longer ones only new elements are taken back


class Watch:
    """
    The state of one step, looked up once and kept from call to call.

    Attributes:
        found: What the step can change.
        parameters: The leaves that gradients are gathered for; grows when a
            backward meets one that the walk did not.
        watched: Tensors, with their names, that an attempt should leave unwritten until its update.
        settled: Optimizers (by `id`) that have completed an update, with the number of parameters that had state
            then. With less, an update creates state, in the middle of which `_version` can't help.
        followed: Optimizers (by `id`) whose update was not the end of a call: memory may run out behind it, so
            that what they write is copied before they do.
        early: Tensors that the step itself writes before the end of a call, copied at entry for the same reason.
        surveyed: A call with a backward has ended, so that all parameters that one reaches are known.
        strangers: How many of them were not found by the walk.
        missed: Optimizers that have stepped and were not found: the next walk starts from them, too.
        is_new: No call has ended yet. Nobody knows what one writes: its attempts keep a full copy.
        unseen: Tensors, with their names, that calls write without a trace in `_version` (through `.data`).
    """

    def __init__(self, function: Callable[..., Any], extra: object = None, arguments: Iterable[object] = ()) -> None:
        self._start = (function, extra, tuple(arguments))
        self.found = found = find_state(*self._start)
        self._complete, self._lengths = found, [len(optimizer.state) for optimizer in found.optimizers]
        self.parameters = found.parameters
        self.norm_buffers = found.norm_buffers()
        self.settled: dict[int, int] = {}
        self.followed: set[int] = set()
        self.early: dict[torch.Tensor, None] = {}
        self.surveyed = False
        self.strangers = 0
        self.missed: list[torch.optim.Optimizer] = []
        self.is_new = True
        self.unseen: list[tuple[torch.Tensor, str]] = []
        _let_gradients_go(found)
        self._known = {id(thing) for thing in (*self.parameters, *found.optimizers)}
        self._bindings: dict[torch.optim.Optimizer, _Bindings] = {}
        # Loading a checkpoint gives an optimizer other state and other groups.
        self._optimizers = [(o, o.state, o.param_groups, len(o.param_groups)) for o in found.optimizers]
        apart = {id(tensor) for tensor in self.norm_buffers}
        apart |= {id(t) for o in found.optimizers for state in o.state.values() for t in state.values()}
        apart |= {id(parameter.grad) for parameter in self.parameters}
        self.watched = [(tensor, name) for tensor, name in found.tensors.items() if id(tensor) not in apart]
        # What counts calls: the attributes of schedulers and scalers, and the groups that schedules write.
        self._counting = [vars(thing) for thing in (*found.schedulers, *found.scalers)]
        self._counting += [group for optimizer in found.optimizers for group in optimizer.param_groups]
        self._containers = [c for _, c, owner in found.containers if not isinstance(owner, STATEFUL)]
        self._containers += [container for _, container, _ in found.kept()]
        cells = [cell for _, cell in found.cells]
        names = [(table, key) for _, table, key in found.globals]
        # A name that stands for a model or an optimizer is not written by a step; any other may be a counter.
        self._cells = [cell for cell in cells if not isinstance(content_of(cell), STATEFUL)]
        self._globals = [(table, key) for table, key in names if not isinstance(table.get(key), STATEFUL)]
        self._globals += found.rebound()
        self._modules = [module for _, module in found.modules]
        leaves = {id(parameter) for parameter in self.parameters}
        self._still = [t for t, _ in self.watched if id(t) not in leaves]  # as far as anyone knows
        self._still_versions = [tensor._version for tensor in self._still]
        self._first = self._still  # before the first call nobody knows: these are copied then
        self._moving = self.norm_buffers
        self._buffers = _by_kind(self._moving)
        tables = [table for table in self._containers if isinstance(table, dict)]
        places = [*names, *((table, key) for table in tables for key in table)]
        self._roots = [(t, k, t[k]) for t, k in places if isinstance(t.get(k), _LEADING)]
        self._cell_roots = [(c, content_of(c)) for c in cells if isinstance(content_of(c), _LEADING)]

    def complete(self) -> Found:
        """Return what a full copy has to hold: looked up again when optimizers have got state since."""
        lengths = [len(optimizer.state) for optimizer in self.found.optimizers]
        if lengths != self._lengths:
            self._complete, self._lengths = find_state(*self._start), lengths
            _let_gradients_go(self._complete)
        return self._complete

    def knows(self, thing: object) -> bool:
        """Tell whether a parameter or optimizer is known, and know it from now on."""
        known = id(thing) in self._known
        self._known.add(id(thing))
        return known

    def bindings_of(self, optimizer: torch.optim.Optimizer) -> _Bindings:
        """Return what *optimizer*'s state binds now."""
        known = self._bindings.get(optimizer)
        if known is None or not known.still_hold():
            known = self._bindings[optimizer] = _Bindings(optimizer)
        return known

    def is_current(self) -> bool:
        """Tell whether the step still reaches the same objects: a new model or optimizer needs a new walk."""
        for cell, value in self._cell_roots:
            if cell.cell_contents is not value:
                return False
        for table, key, value in self._roots:
            if table.get(key) is not value:
                return False
        for optimizer, state, groups, count in self._optimizers:
            if optimizer.state is not state or optimizer.param_groups is not groups or len(groups) != count:
                return False
        return not self.missed

    def follow(self, earlier: Watch) -> None:
        """Take over what *earlier* has learnt of the same tensors."""
        self.is_new = earlier.is_new or not set(self.parameters) <= set(earlier.parameters)
        self.unseen = [pair for pair in earlier.unseen if pair[0] in self.found.tensors]
        self.early = {tensor: None for tensor in earlier.early if tensor in self.found.tensors}

    def copy_what_moves(self) -> None:
        """Copy small tensors that calls write from now on: those whose version has changed since the last call."""
        versions = [tensor._version for tensor in self._still]
        if versions != self._still_versions:
            pairs = zip(self._still, versions, self._still_versions, strict=True)
            moved = {id(t) for t, now, before in pairs if now != before and t.nbytes <= _MOVING_BYTES}
            self._moving = self._moving + [tensor for tensor in self._still if id(tensor) in moved]
            self._buffers = _by_kind(self._moving)
            self.watched = [pair for pair in self.watched if id(pair[0]) not in moved]
            self._still = [tensor for tensor in self._still if id(tensor) not in moved]
            versions = [tensor._version for tensor in self._still]
        self._still_versions = versions


def _nothing() -> None:
    """Reach no state: a walk that starts elsewhere."""


def _note_versions(values: Iterable[object], noted: list[tuple[torch.Tensor, int]]) -> None:
    """Add the tensors in *values*, nested ones too, with their versions to *noted*."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_inference():  # such tensors can't be written outside inference mode, and have no version
                noted.append((value, value._version))
        elif isinstance(value, dict):
            _note_versions(value.values(), noted)
        elif isinstance(value, list | tuple):
            _note_versions(value, noted)


def _let_gradients_go(found: Found) -> None:
    """Hold no gradient from one call to the next: each attempt looks up those of its own entry."""
    for parameter in found.parameters:
        if parameter.grad is not None:
            found.tensors.pop(parameter.grad, None)


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Pair tensors with room for a copy, in lists of one dtype and device: one kernel copies such a list."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with beside_the_device():
        return [(kind, [torch.empty_like(tensor) for tensor in kind]) for kind in kinds.values()]


def _copied(watch: Watch) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """Copy to the host what calls write early, and once what nobody knows yet to be written by them."""
    first, watch._first = watch._first, []
    return [(tensor, tensor._version, _on_host(tensor)) for tensor in (*first, *watch.early)]


class _Bindings:
    """What an optimizer's state binds; kept from call to call as long as it binds the same."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        self._state, self._outer = optimizer.state, list(optimizer.state.items())
        self.tables = [(key, table, list(table.items())) for key, table in self._outer if isinstance(table, dict)]
        values = [value for _, _, entries in self.tables for _, value in entries]
        self.tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.lists = [value for value in values if isinstance(value, list)]
        # PyTorch's own write their state in place, but for two. There a look at the last parameter is enough: it
        # shows whether someone has bound all anew (moved to another device); looking at all costs what a call may.
        self._binds_anew = not kind.__module__.startswith("torch.optim.") or kind.__name__ in ("LBFGS", "SparseAdam")
        self._last = [*map(id, self._outer[-1][1].values())] if self._outer and not self._binds_anew else _NONE

    def still_hold(self) -> bool:
        """Tell whether the same objects are bound; since they are kept here, no other has the number of one."""
        state = self._state
        if self._binds_anew or len(state) != len(self._outer):
            return False
        return not state or [*map(id, next(reversed(state.values())).values())] == self._last

    def restore(self) -> None:
        """Bind the same again; what was created since is dropped."""
        for container, entries in ((self._state, self._outer), *((table, held) for _, table, held in self.tables)):
            if not same_entries(entries, entries_of(container)):
                refill(container, entries)


class _OptimizerState:
    """
    What an optimizer's state holds before an update, which may write its tensors and bind others in their place.

    Attributes:
        copied: What the update writes, with copies on the host; empty unless asked for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, bindings: _Bindings, *, copy: bool) -> None:
        self._optimizer, self._bindings = optimizer, bindings
        self._versions = [tensor._version for tensor in bindings.tensors]
        self._lists = [list(held) for held in bindings.lists] if bindings.lists else _NONE
        self.copied: dict[torch.Tensor, torch.Tensor] = {}
        if copy:
            self.copied = {tensor: _on_host(tensor) for tensor in (*parameters_of(optimizer), *bindings.tensors)}

    def restore(self) -> None:
        """Bind what was bound: numbers and lists come back, and tensors that were copied or not written in place."""
        with torch.no_grad():
            for tensor, copied in self.copied.items():
                tensor.copy_(copied)
        self._bindings.restore()
        for held, entries in zip(self._bindings.lists, self._lists, strict=True):
            if not same_entries(entries, held):
                refill(held, entries)

    def written(self, names: dict[torch.Tensor, str]) -> list[str]:
        """Name the tensors that were written in place and have no copy; *names* are those of the parameters."""
        if self.copied:
            return []
        unknown = f"a parameter of {type(self._optimizer).__name__}"
        tensors = [
            (value, f"{key} of {names.get(parameter, unknown)}")
            for parameter, _, entries in self._bindings.tables
            for key, value in entries
            if isinstance(value, torch.Tensor)
        ]
        pairs = zip(tensors, self._versions, strict=True)
        written = [name for (tensor, name), version in pairs if tensor._version != version]
        if written and _is_fused(self._optimizer):  # only the count of steps shows that the rest may have moved
            return [f"the update of {type(self._optimizer).__name__}"]
        return written


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that changes when *tensor* is written."""
    if not computes(tensor.device):
        return torch.zeros(())
    with beside_the_device(), torch.no_grad():
        if tensor.is_floating_point() and tensor.device.type != "mps":  # which has no double precision
            norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
            return norm
        return tensor.sum()


def _looks(watched: Iterable[tuple[torch.Tensor, str]]) -> list[tuple[int, torch.Tensor]]:
    return [(tensor._version, _fingerprint(tensor)) for tensor, _ in watched]


def _same(now: torch.Tensor, before: torch.Tensor) -> bool:
    with beside_the_device():
        return bool(torch.isclose(now, before, rtol=0, atol=0, equal_nan=True))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    with beside_the_device():
        return tensor.detach().to("cpu", copy=True)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that *optimizer* updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether *optimizer* updates by kernels that leave no trace in `_version`."""
    return any(group.get("fused") for group in optimizer.param_groups)


def _states_of(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    return {key: dict(state) for key, state in scaler._per_optimizer_states.items()}


def _entries_or_length(container: Any) -> list[Any] | int:
    return entries_of(container) if len(container) <= _SMALL else len(container)


class Entry:
    """
    A step's state at the entry of one attempt.

    Args:
        watch: The step's state.
        args: The arguments of the call: its tensors must not be written.
        kwargs: Its keyword arguments.
        copy: Keep a full copy on the host from the start. Otherwise the first call
            does, and one is made when an optimizer begins its first update.
    """

    def __init__(
        self,
        watch: Watch,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        copy: bool = False,
    ) -> None:
        # Every guarded call pays for these lines: nothing is done for what a step does not have.
        found = watch.found
        self._watch = watch
        self._random = RandomState(found, python=found.draws_python)
        self.gradients = [(p, gradient) for p in watch.parameters if (gradient := p.grad) is not None]
        self._gradient_versions = [gradient._version for _, gradient in self.gradients] if self.gradients else []
        self._by_parameter: dict[int, torch.Tensor] | None = None
        self._inputs: list[tuple[torch.Tensor, int]] = []
        _note_versions(args, self._inputs)
        if kwargs:
            _note_versions(kwargs.values(), self._inputs)
        if watch._still:
            watch.copy_what_moves()
        self._watched = watch.watched
        self._versions = [tensor._version for tensor, _ in self._watched]
        self._first = _copied(watch) if watch._first or watch.early else _NONE
        self._counting = [dict(table) for table in watch._counting]
        self._scalers = [_states_of(scaler) for scaler in found.scalers] if found.scalers else _NONE
        self._containers = [_entries_or_length(c) for c in watch._containers] if watch._containers else _NONE
        self._cells = [content_of(cell) for cell in watch._cells] if watch._cells else _NONE
        self._globals = [table.get(key, _MISSING) for table, key in watch._globals] if watch._globals else _NONE
        self._training = [module.training for module in watch._modules] if found.sets_modes else _NONE
        for tensors, copies in watch._buffers:
            torch._foreach_copy_(copies, tensors)
        self._closely = [(pair, _fingerprint(pair[0])) for pair in watch.unseen] if watch.unseen else _NONE
        self._looks = _looks(self._watched) if watch.is_new else _NONE
        copy = copy or watch.is_new
        self._is_copied = copy
        self._saved = [Saved(watch.complete())] if copy else []
        self._gradient_copies = [_on_host(gradient) for _, gradient in self.gradients] if copy else None
        self._lost_before: list[str] = _NONE  # what was written before there was a copy
        self._states: dict[torch.optim.Optimizer, _OptimizerState] = {}
        self._updated: list[torch.optim.Optimizer] = []  # those that have completed an update
        self._by_hand: list[torch.Tensor] = []  # what was written before an update began
        self._has_gone_on = watch.is_new  # a later call looks from its second backward on
        self._unseen: list[str] = []  # updates that `_version` does not show

    def update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note *optimizer*'s state; before its first update, copy everything to the host, and if it is not the last."""
        watch = self._watch
        if watch.is_new:
            self.look()
        if len(optimizer.state) < watch.settled.get(id(optimizer), sys.maxsize):
            if not self._is_copied:
                self._is_copied, self._lost_before = True, self._written()
                self._saved.append(Saved(watch.complete()))
            if not watch.knows(optimizer):
                watch.missed.append(optimizer)
                self._saved.append(Saved(find_state(_nothing, optimizer)))
        if optimizer not in self._states:
            copy = not self._is_copied and id(optimizer) in watch.followed
            if copy or watch.is_new:  # a copy that is made now does not hold what was there before these
                self._by_hand += self._written_by_hand()
            self._states[optimizer] = _OptimizerState(optimizer, watch.bindings_of(optimizer), copy=copy)

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that *optimizer* has completed an update."""
        self._watch.settled[id(optimizer)] = len(optimizer.state)
        if self._watch.is_new:
            self.look()
        self._updated.append(optimizer)
        if _is_fused(optimizer) and not self._states[optimizer].copied:
            self._unseen.append(f"the update of {type(optimizer).__name__}")

    def goes_on(self) -> None:
        """Note what was written before the end of the call, at a backward or when memory has run out."""
        if self._updated or self._has_gone_on:
            self._watch.followed.update(map(id, self._updated))
            self._watch.early.update(dict.fromkeys((*self._by_hand, *self._written_by_hand())))
        self._has_gone_on = True

    def _written_by_hand(self) -> list[torch.Tensor]:
        """Return the watched tensors that were written, less those of optimizers that have begun an update."""
        own = {id(parameter) for optimizer in self._states for parameter in parameters_of(optimizer)}
        pairs = zip(self._watched, self._versions, strict=True)
        written = [tensor for (tensor, _), version in pairs if tensor._version != version]
        if self._watch.is_new:
            written += [tensor for tensor, _ in self._watch.unseen]
        written += [tensor for tensor, _ in self._changed_without_a_trace()]
        return [tensor for tensor in written if id(tensor) not in own]

    def look(self) -> None:
        """Note, in a first call, what was written without a trace since the last look: later calls watch it closely."""
        watch = self._watch
        before, self._looks = self._looks, _looks(self._watched)
        announced = {id(p) for o in watch.found.optimizers if _is_fused(o) for p in parameters_of(o)}
        known = announced | {id(tensor) for tensor, _ in watch.unseen}
        for pair, (version, value), (old_version, old_value) in zip(self._watched, self._looks, before, strict=True):
            if version == old_version and not _same(value, old_value) and id(pair[0]) not in known:
                watch.unseen.append(pair)

    def call_ended(self) -> None:
        """Note that the call has ended well: what it writes is known from now on."""
        if self._watch.is_new:
            self.look()
            self._watch.is_new = False

    def adopt(self, leaves: Iterable[torch.Tensor]) -> None:
        """Note the gradients of leaves that the walk has not found, before a backward adds to them."""
        for leaf in leaves:
            if not self._watch.knows(leaf):
                self._watch.parameters.append(leaf)
                self._watch.strangers += isinstance(leaf, torch.nn.Parameter)
                if leaf.grad is not None:
                    self.gradients.append((leaf, leaf.grad))
                    self._gradient_versions.append(leaf.grad._version)
                    if self._gradient_copies is not None:
                        self._gradient_copies.append(_on_host(leaf.grad))
                    self._by_parameter = None

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that *parameter* had at entry."""
        if self._by_parameter is None:
            self._by_parameter = {id(known): gradient for known, gradient in self.gradients}
        return self._by_parameter.get(id(parameter))

    def has_moved(self) -> bool:
        """Tell whether a watched tensor was written since."""
        return any(t._version != v for (t, _), v in zip(self._watched, self._versions, strict=True))

    def restore(self) -> list[str]:
        """
        Put everything back.

        Returns:
            The names of what was written and has no copy. If there are any, nothing
            but what surrounds the update (random states, counters, gradients) was put back.
        """
        lost = self._lost()
        if self._gradient_copies:
            with torch.no_grad():
                for i in self._changed_gradients():
                    self.gradients[i][1].copy_(self._gradient_copies[i])
        for saved in reversed(self._saved):
            saved.restore()
        for state in self._states.values():
            state.restore()
        self._restore_tables()
        self._restore_names()
        self._restore_tensors()
        self.restore_gradients()
        self._random.restore()
        torch.clear_autocast_cache()
        return lost

    def _restore_tables(self) -> None:
        for table, before in zip(self._watch._counting, self._counting, strict=True):
            entries = list(before.items())
            if not same_entries(entries, entries_of(table)):
                refill(table, entries)
        for scaler, states in zip(self._watch.found.scalers, self._scalers, strict=True):
            refill(scaler._per_optimizer_states, list(states.items()))
        for container, held in zip(self._watch._containers, self._containers, strict=True):
            if isinstance(held, list):
                if not same_entries(held, entries_of(container)):
                    refill(container, held)
            elif isinstance(container, list):
                del container[held:]

    def _restore_tensors(self) -> None:
        with torch.no_grad():
            for tensor, version, copied in self._first:
                if tensor._version != version or tensor in self._watch.early:  # which `.data` may have written
                    tensor.copy_(copied)
            for tensors, copies in self._watch._buffers:
                torch._foreach_copy_(tensors, copies)
        for module, training in zip(self._watch._modules, self._training, strict=False):
            module.training = training

    def restore_gradients(self) -> None:
        """Give every parameter the gradient that it had, or none."""
        for parameter in self._watch.parameters:
            gradient = self.gradient_of(parameter)
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _restore_names(self) -> None:
        for cell, content in zip(self._watch._cells, self._cells, strict=True):
            if content_of(cell) is not content:
                cell.cell_contents = content
        for (table, name), value in zip(self._watch._globals, self._globals, strict=True):
            if value is _MISSING:
                table.pop(name, None)
            elif table.get(name, _MISSING) is not value:
                table[name] = value

    def _lost(self) -> list[str]:
        """Name what was written and has no copy."""
        names = [
            "an input of the step, written in place" for tensor, version in self._inputs if tensor._version != version
        ]
        if self._gradient_copies is None and self._changed_gradients():
            names.append("a gradient that was there at entry")
        names += self._lost_before if self._is_copied else self._written()
        return list(dict.fromkeys(names))

    def _written(self) -> list[str]:
        """Name the state that was written, whether or not it has a copy; gradients come back by another way."""
        copied = {id(tensor) for state in self._states.values() for tensor in state.copied}
        copied -= set(map(id, self._by_hand))
        copied |= {id(tensor) for tensor, _, _ in self._first}
        pairs = zip(self._watched, self._versions, strict=True)
        names = [name for (t, name), version in pairs if t._version != version and id(t) not in copied]
        for state in self._states.values():
            names += state.written(self._watch.found.tensors)
        names += [name for tensor, name in self._changed_without_a_trace() if id(tensor) not in copied]
        return names + self._unseen

    def _changed_without_a_trace(self) -> list[tuple[torch.Tensor, str]]:
        """Return what is watched closely and was written, with its name."""
        return [pair for pair, before in self._closely if not _same(_fingerprint(pair[0]), before)]

    def _changed_gradients(self) -> list[int]:
        """Return the positions of the gradients at entry that were written."""
        # GradScaler writes gradients without a trace in `_version`, but notes that it has.
        unscaled = [_states_of(scaler) for scaler in self._watch.found.scalers] != self._scalers
        pairs = zip(self.gradients, self._gradient_versions, strict=True)
        found = [
            i
            for i, ((parameter, gradient), version) in enumerate(pairs)
            if gradient._version != version or (unscaled and parameter.grad is gradient)
        ]
        if self._gradient_copies is not None:
            return found
        with beside_the_device():  # one that the step has zeroed in place stays zero: the step will zero it again
            return [i for i in found if bool(self.gradients[i][1].detach().cpu().count_nonzero())]
