"""
Run one step in pieces, with its update held back until the last.

In every piece but the last only `backward` has an effect. All backwards go
through one door, `torch.autograd._engine_run_backward`; standing there, a run
weights what flows in, lets the engine accumulate into gradients kept aside, and
leaves every `grad` as the step had it: None. So in the early pieces the step's
own clipping and `optimizer.step` find no gradients and do nothing. The last
piece is handed the whole gradient, and the step's own code does the rest. Only
what counts calls is held by name: schedulers, gradient scalers, averaged models.

Whatever can't be held back so is refused: by the order of
calls, which must be the same in every piece, by what a piece has changed, and
on a step's first run in pieces by an audit of every operation.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from oomguard.memory.device import computes
from oomguard.step.attempt import Entry, Watch, parameters_of
from oomguard.step.audit import Audit, ReadAudit, Refusal, WriteAudit
from oomguard.step.state import Saved

_HELD: tuple[tuple[type, tuple[str, ...]], ...] = (
    (LRScheduler, ("step",)),
    (torch.amp.GradScaler, ("unscale_", "step", "update")),
    (AveragedModel, ("update_parameters",)),
)
_ROUNDING = 1e-5  # of counts that are kept in float32
_NEAR = 32  # nodes between a loss and the cross entropies that it is made of
_running: ContextVar[WholeRun | None] = ContextVar("oomguard_run", default=None)


def is_running() -> bool:
    """Tell whether a guarded step runs here."""
    return _running.get() is not None


class WholeRun:
    """
    One call of a step as it is, with gradients that were there at entry kept aside until it has ended.

    An attempt that fails half-way through a backward has added to some gradients
    and not to others; what was kept aside can be put back as it was.

    Args:
        watch: What the step can change.
        entry: Its state at the entry of the call.
    """

    is_last = True  # the update of this piece takes effect

    def __init__(self, watch: Watch, entry: Entry) -> None:
        self._watch, self._entry = watch, entry
        self._hidden: dict[torch.Tensor, torch.Tensor | None] | None = None  # not None: inside the engine
        self._surveys = False
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # gradients at entry plus what came to them

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step once and return what it returns."""
        token = _running.set(self)
        try:
            result = function(*args, **kwargs)
        finally:
            _running.reset(token)
        self._watch.surveyed |= self._surveys
        if self._sums:
            self._settle_gradients()
        return result

    def backward(self, engine: Callable[..., Any], outputs: Sequence[Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Stand at the door: let *engine* run, with the gradients where this run wants them."""
        if self._watch.is_new:
            self._entry.look()
        self._entry.goes_on()
        if not self._watch.surveyed and kwargs.get("accumulate_grad"):
            self._entry.adopt(_leaves(outputs))
            self._surveys = True
        if not self._entry.gradients or self._hidden is not None or not kwargs.get("accumulate_grad"):
            return engine(outputs, *args, **kwargs)
        # A hook on an accumulated gradient wants to see all of it.
        held = [p for p, g in self._entry.gradients if p.grad is g and not p._post_accumulate_grad_hooks]
        return self._accumulate(engine, outputs, args, kwargs, held, {})

    def update_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002 - pieces look at them
        """Stand before every `optimizer.step`."""
        self._entry.update_begins(optimizer)

    def update_ended(self, optimizer: Optimizer) -> None:
        """Stand behind every `optimizer.step`."""
        self._entry.update_ended(optimizer)

    def counts(self, real: Callable[..., Any], name: str, owner: Any, args: tuple[Any, ...], kwargs: Any) -> Any:  # noqa: ARG002 - as above
        """Run a call that counts."""
        return real(owner, *args, **kwargs)

    def _accumulate(
        self,
        engine: Callable[..., Any],
        outputs: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: Any,
        leaves: Iterable[torch.Tensor],
        gathered: dict[torch.Tensor, torch.Tensor],
    ) -> Any:
        self._hide(leaves, gathered)
        done = False
        try:
            result = engine(outputs, *args, **kwargs)
            done = True
        finally:
            hidden, self._hidden = self._hidden or {}, None
            for leaf, own in hidden.items():
                new, leaf.grad = leaf.grad, own
                if done and new is not None:
                    self._hand_over(leaf, own, new, gathered)
        return result

    def _hide(self, leaves: Iterable[torch.Tensor], gathered: dict[torch.Tensor, torch.Tensor]) -> None:
        """Take the gradients of *leaves* aside, and go on where the pieces before stopped."""
        hidden = {} if self._hidden is None else self._hidden
        for leaf in leaves:
            if leaf not in hidden:
                hidden[leaf] = leaf.grad
                leaf.grad = gathered.pop(leaf, None)
        self._hidden = hidden

    def _hand_over(
        self,
        leaf: torch.Tensor,
        own: torch.Tensor | None,
        new: torch.Tensor,
        gathered: dict[torch.Tensor, torch.Tensor],
    ) -> None:
        if not self.is_last:
            gathered[leaf] = new
        elif own is None:
            leaf.grad = new
        elif self._entry.gradient_of(leaf) is own:  # not in place: it may have to come back
            with torch.no_grad():
                leaf.grad = self._sums[leaf] = own + new
        else:
            with torch.no_grad():
                leaf.grad = own.add_(new)

    def _settle_gradients(self) -> None:
        """Put sums into the tensors that held the gradients at entry, for those who keep a reference to them."""
        for parameter, total in self._sums.items():
            own = self._entry.gradient_of(parameter)
            if own is None or parameter.grad is not total or total.layout != own.layout:
                continue
            if own._is_view():
                own.copy_(total)
            else:
                own.data = total.data
            parameter.grad = own


def _remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a run remember what *method* refuses: a step that catches errors must not go on as if nothing were."""

    @functools.wraps(method)
    def remembering(self: PiecewiseRun, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Refusal as refusal:
            self._refusal = refusal
            raise

    return remembering


class PiecewiseRun(WholeRun):
    """
    One call of a step in pieces.

    Args:
        watch: What the step can change.
        entry: Its state at the entry of the call.
        weights: The share of each piece in the whole gradient, n_i/N for a mean and 1 for a sum.
        sizes: The number of items in each piece.
        mean: Losses are means over the batch: a plain sum is then refused.
        audited: Look at every operation of the first and the last piece.
    """

    def __init__(
        self,
        watch: Watch,
        entry: Entry,
        weights: Sequence[float],
        sizes: Sequence[int],
        *,
        mean: bool = True,
        audited: bool = False,
    ) -> None:
        super().__init__(watch, entry)
        self._weights, self._sizes, self._mean, self._audited = weights, sizes, mean, audited
        self._piece = 0
        self._gathered: dict[int, dict[torch.Tensor, torch.Tensor]] = {}  # by the number of the backward in a piece
        self._counts: dict[int, list[float]] = {}  # what losses divide by, for each item, by the same number
        self._calls: list[tuple[object, ...]] = []  # backwards and updates of the first piece
        self._call = 0
        self._refusal: Refusal | None = None  # for a step that catches it
        self._holding = 0  # depth of held calls that run for real
        self._audit: Audit | None = None
        self._writes: WriteAudit | None = None

    @property
    def is_last(self) -> bool:  # type: ignore[override]
        """The update of this piece takes effect."""
        return self._piece == len(self._weights) - 1

    def run_all(
        self, function: Callable[..., Any], calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Run the step once for each piece and return what the pieces return."""
        results: list[Any] = []
        before = Saved(self._watch.found, values=False)
        with _calls_held(), _set(_running, self):
            for self._piece, (args, kwargs) in enumerate(calls):
                self._begin_piece()
                results.append(self._run_piece(function, args, kwargs))
                self._end_piece(before)
        self._settle_gradients()
        return results

    # One piece

    def _begin_piece(self) -> None:
        self._call = 0
        if self.is_last:
            self._entry.restore_gradients()
        else:
            for parameter in self._watch.parameters:
                parameter.grad = None

    def _run_piece(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        modes: list[Any] = []
        if self._audited and self._piece == 0:
            self._audit = Audit(self._watch.norm_buffers)
            modes.append(self._audit)
        elif self._audited and self.is_last:
            self._writes = WriteAudit(self._watch.parameters)
            modes.append(self._writes)
        kept, reads = [], ReadAudit()
        if self._audited and self._piece <= 1:  # the second reads what the first has kept
            kept = self._watch.found.kept_tensors()
            modes.append(reads)
        try:
            with contextlib.ExitStack() as stack:
                if modes and "torch._dynamo" in sys.modules:
                    # Under a mode compiled functions run as they were written, and some versions never compile them
                    # again, unless they were told to.
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                for mode in modes:
                    stack.enter_context(mode)
                result = self._call_piece(function, args, kwargs)
        except Exception:
            self._raise_refusal()  # which the step may have wrapped
            raise
        else:
            self._raise_refusal()  # or swallowed
        finally:
            self._audit = None
        for name, table, key, tensors in kept:
            now = {id(leaf) for leaf in tree_leaves(table.get(key))}
            if now.isdisjoint(map(id, tensors)) and reads.has_read(tensors):
                raise Refusal(f"it keeps {name} from one call to the next, and every piece would change it")
        return result

    def _raise_refusal(self) -> None:
        refusal = self._refusal or (self._audit.refusal if self._audit is not None else None)
        if refusal is not None:
            raise refusal from None

    def _call_piece(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if self.is_last or "NoneType" not in str(error):
                raise
            raise Refusal(f"it reads gradients, which early pieces do not have: {error}") from error

    def _end_piece(self, before: Saved) -> None:
        if self._call != len(self._calls):
            raise Refusal(f"its pieces differ: {_name_call(self._calls[self._call])} is missing in one")
        if self.is_last:
            return
        if any(parameter.grad is not None for parameter in self._watch.parameters):
            raise Refusal("it sets gradients by hand")
        if self._piece == 0:
            changed = before.changes(ignore=self._watch.norm_buffers)
            if changed:
                raise Refusal(f"every piece changes {', '.join(changed[:5])}")

    def _note(self, *call: object) -> int:
        """Compare one backward or update with that of the first piece, before it takes effect."""
        if self._piece == 0:
            self._calls.append(call)
        elif self._call >= len(self._calls) or self._calls[self._call] != call:
            raise Refusal(f"its pieces differ: {_name_call(call)} is not in all of them")
        self._call += 1
        return self._call

    # The door

    @_remembered
    def backward(self, engine: Callable[..., Any], outputs: Sequence[Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Weight what flows in, and gather what flows out."""
        if self._watch.is_new:
            self._entry.look()
        gradients, _, create_graph, inputs, *_ = args
        if not kwargs.get("accumulate_grad"):
            self._check_grad(outputs, inputs)
            return engine(outputs, *args, **kwargs)
        if self._hidden is not None:  # a checkpoint recomputes: its backward belongs to the one that is running
            self._entry.adopt(_leaves(outputs))
            self._hide(self._watch.parameters, {})
            return engine(outputs, *args, **kwargs)
        if create_graph:
            raise Refusal("it differentiates a gradient of its parameters (backward with create_graph=True)")
        number = self._note("backward")
        if self._mean:
            self._check_loss(outputs)
            self._check_counts(outputs, number)
        moved = self._entry.has_moved() or (self._writes is not None and self._writes.written)
        if self.is_last and number > 1 and moved:
            raise Refusal("it moves parameters between two backwards")
        leaves = _leaves(outputs)
        for leaf in leaves:
            if leaf._post_accumulate_grad_hooks:
                raise Refusal("a hook acts on a gradient as soon as it is there (register_post_accumulate_grad_hook)")
            if leaf._backward_hooks:
                raise Refusal("a hook changes the gradient of a parameter (register_hook)")
        self._entry.adopt(leaves)
        weight = self._weights[self._piece]
        if weight == 0:  # a piece with nothing to count: its mean is no number, and its share nothing
            engine = _nothing
        gradients = tuple(None if g is None else g * weight for g in gradients)
        gathered = self._gathered.setdefault(number, {})
        return self._accumulate(engine, outputs, (gradients, *args[1:]), kwargs, self._watch.parameters, gathered)

    def _check_grad(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        if _is_vmapped():  # one sample at a time
            return
        if torch._C._functorch.maybe_current_level() is not None:
            raise Refusal("it takes a gradient by torch.func, whose share of the whole can't be known")
        known = {id(parameter) for parameter in self._watch.parameters}
        if any(isinstance(tensor, nn.Parameter) or id(tensor) in known for tensor in inputs):
            raise Refusal("it takes the gradient of its parameters by torch.autograd.grad")
        for output in outputs:
            if output.numel() == 1 and not _is_sum(output.grad_fn):
                raise Refusal(
                    "it takes the gradient of a mean over the batch by torch.autograd.grad; take that of the sum"
                )

    def _check_loss(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                continue
            if output.numel() > 1:
                raise Refusal("it calls backward on more than one number: say oom_guard(reduction='sum') if it adds")
            if _is_sum(self._unscaled(output.grad_fn), rows=self._sizes[self._piece]):
                raise Refusal("its loss is a sum over the batch, not a mean: say oom_guard(reduction='sum')")

    def _check_counts(self, outputs: Sequence[Any], number: int) -> None:
        """Compare what a cross entropy divides by with the first piece: ignored targets and class weights vary."""
        size = self._sizes[self._piece]
        totals = [node._saved_total_weight for node in _cross_entropies(outputs)]
        counts = [float(total) / size for total in totals if computes(total.device)]
        expected = self._counts.setdefault(number, counts)
        if any(abs(count - first) > _ROUNDING * abs(first) for count, first in zip(counts, expected, strict=False)):
            raise Refusal(
                "its loss is a mean over targets that are not ignored, or over class weights, and not over items: "
                "give oom_guard(reduction=...) a function that counts them"
            )

    def _unscaled(self, node: Any) -> Any:
        """Return the node of the loss that a scaler has multiplied, or *node* itself."""
        other = getattr(node, "_saved_other", None)
        scales = [scaler._scale for scaler in self._watch.found.scalers if scaler._scale is not None]
        if isinstance(other, torch.Tensor) and any(other.data_ptr() == scale.data_ptr() for scale in scales):
            return node.next_functions[0][0]
        return node

    # What counts calls

    @_remembered
    def update_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare, and hold back in all pieces but the last."""
        if not self._holding:
            if len(args) > 1 or kwargs.get("closure") is not None:  # args[0] is the optimizer
                raise Refusal(f"{type(optimizer).__name__}.step takes a closure, which it may call more than once")
            self._note("update", id(optimizer))
        if self.is_last:
            self._entry.update_begins(optimizer)
        else:
            self._hold_back(optimizer)

    def _hold_back(self, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        if any(parameter.grad is not None for parameter in parameters):
            raise Refusal("it sets gradients by hand")
        if self._audit is not None:
            self._audit.held_back(parameters)

    def update_ended(self, optimizer: Optimizer) -> None:
        """Note it if it took effect."""
        if self.is_last:
            super().update_ended(optimizer)

    @_remembered
    def counts(self, real: Callable[..., Any], name: str, owner: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run what counts calls in the last piece only."""
        if self._holding:
            return real(owner, *args, **kwargs)
        if isinstance(owner, ReduceLROnPlateau) or (isinstance(owner, LRScheduler) and (args or kwargs)):
            raise Refusal(f"{type(owner).__name__}.step takes a metric, which only the whole batch has")
        if isinstance(owner, torch.amp.GradScaler) and name != "update":
            self._note(f"GradScaler.{name}", id(owner))
            if name == "step" and not self.is_last:
                self._hold_back(args[0] if args else kwargs["optimizer"])
        if not self.is_last:
            return None
        self._holding += 1
        try:
            return real(owner, *args, **kwargs)
        finally:
            self._holding -= 1


def _nothing(*_: Any, **__: Any) -> None:
    """Take the engine's place."""


def _name_call(call: tuple[object, ...]) -> str:
    return {"backward": "a backward", "update": "an optimizer.step"}.get(str(call[0]), f"a call of {call[0]}")


def _leaves(outputs: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors whose `grad` a backward from *outputs* adds to."""
    found: dict[torch.Tensor, None] = {}
    waiting = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found[node.variable] = None
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found)


def _is_sum(node: Any, rows: int | None = None) -> bool:
    """Tell whether *node* adds up a batch (of *rows* items): by `sum`, or as a loss with reduction='sum'."""
    if getattr(node, "_saved_reduction", None) == 2:  # noqa: PLR2004 - PyTorch's number for "sum"
        return True
    if node is None or not node.name().startswith("SumBackward"):
        return False
    sizes: Sequence[int] = getattr(node, "_saved_self_sym_sizes", ())
    return rows is None or (len(sizes) > 0 and sizes[0] == rows)


def _cross_entropies(outputs: Iterable[Any]) -> list[Any]:
    """Return the nodes of cross entropies with reduction="mean" that are near *outputs*."""
    found: list[Any] = []
    waiting: list[Any] = [getattr(output, "grad_fn", None) for output in outputs]
    for _ in range(_NEAR):
        if not waiting:
            break
        node = waiting.pop(0)
        if hasattr(node, "_saved_total_weight"):
            if node._saved_reduction == 1:
                found.append(node)
        elif node is not None:
            waiting += [following for following, _ in node.next_functions]
    return found


def _is_vmapped() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


# What is replaced in PyTorch, while a guard is entered and while a step runs in pieces.
# Guards of several threads may overlap, so the first one in replaces and the last one out puts back.


class _Shared:
    """A context that is entered once however many are inside."""

    def __init__(self, enter: Callable[[contextlib.ExitStack], None]) -> None:
        self._enter, self._undo, self._inside, self._lock = enter, contextlib.ExitStack(), 0, threading.Lock()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._enter(self._undo)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._undo.close()


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    real = vars(owner)[name]
    undo.callback(setattr, owner, name, real)
    setattr(owner, name, make(real))


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep *function* out of a step that is compiled; `torch.compiler.disable` would import the compiler right away."""
    wrapped: Callable[..., Any] = _disable_dynamo(function)
    return wrapped


def _open_door(undo: contextlib.ExitStack) -> None:
    def make(engine: Callable[..., Any]) -> Callable[..., Any]:
        @_not_compiled
        def door(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            run = _running.get()
            if run is None or TracingContext.try_get() is not None:  # a compiler differentiates what it traces
                return engine(outputs, *args, **kwargs)
            return run.backward(engine, outputs, args, kwargs)

        return door

    @_not_compiled
    def begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (run := _running.get()) is not None:
            run.update_begins(optimizer, args, kwargs)

    @_not_compiled
    def ended(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if (run := _running.get()) is not None:
            run.update_ended(optimizer)

    _replace(undo, torch.autograd, "_engine_run_backward", make)
    undo.callback(register_optimizer_step_pre_hook(begins).remove)
    undo.callback(register_optimizer_step_post_hook(ended).remove)


def _hold_calls(undo: contextlib.ExitStack) -> None:
    def hold(name: str) -> Callable[[Any], Any]:
        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            @_not_compiled
            def held(owner: Any, *args: Any, **kwargs: Any) -> Any:
                run = _running.get()
                return real(owner, *args, **kwargs) if run is None else run.counts(real, name, owner, args, kwargs)

            return held

        return make

    for base, names in _HELD:
        for cls in set(_with_subclasses(base)):
            for name in names:
                if name in vars(cls):
                    _replace(undo, cls, name, hold(name))
    # clip_grad_value_ groups the gradients that it finds, and that grouping refuses an empty list.
    _replace(undo, clip_grad, "_group_tensors_by_device_and_dtype", lambda real: lambda x: real(x) if x[0] else {})


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclass: type
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


intercepted = _Shared(_open_door)
_calls_held = _Shared(_hold_calls)
