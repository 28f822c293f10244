"""
The run-time guard: an OOM in mid-training is met by running the same batch in smaller pieces.

A `with` body can't be run twice, so what is retried is a call: of a step that
`fit_batch` has decorated, or of any function through `Guard.run`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from torch import nn

from oomguard.errors import BatchLimitError, InputError, OOMGuardWarning, SplitError
from oomguard.memory.device import memory_of
from oomguard.memory.oom import is_oom
from oomguard.memory.units import format_bytes
from oomguard.ranks import require_one_rank, require_own_backward
from oomguard.recovery import Failure, Policy, Record, Recovery, attempt
from oomguard.report import GuardEvent, GuardReport
from oomguard.step.attempt import Watch
from oomguard.step.call import HasStep, Limit, Runner, Step, ambient
from oomguard.step.inputs import may_hold_batch, read_batch
from oomguard.step.pieces import WholeRun, intercepted, is_running

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = str(Path(__file__).parent)
_LOG = logging.getLogger("oomguard")
_DROPOUT = (nn.modules.dropout._DropoutNd,)


class Guard:
    """
    Runs steps so that an OOM costs a retry and not the training; made by `oom_guard`.

    Attributes:
        limit: The largest piece still used, in items; None while there is no limit.
        report: What happened so far.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        state: object,
        on_event: Callable[[GuardEvent], object] | None,
        grow_after: int | None,
        enabled: bool,
    ) -> None:
        self._policy, self._state, self._on_event = policy, state, on_event
        self._grow_after, self._enabled = grow_after, enabled
        self._records: dict[Any, Record] = {}
        self._remembered: dict[str, list[Limit]] = {}  # from load_state_dict, for steps not met yet
        self._events: list[GuardEvent] = []
        self._calls = self._split_calls = 0
        self._warned = False
        self._entered: list[tuple[contextlib.ExitStack, Token[Runner | None] | None]] = []

    # The context

    def __enter__(self) -> Self:
        stack, token = contextlib.ExitStack(), None
        if self._enabled:
            require_one_rank("oom_guard")
            stack.enter_context(intercepted())
            token = ambient.set(self)
        self._entered.append((stack, token))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stack, token = self._entered.pop()
        stack.close()
        if token is None:
            return
        ambient.reset(token)
        if error is not None and is_oom(error) and not isinstance(error, BatchLimitError | SplitError):
            error.add_note(
                "oomguard: this out-of-memory error came from outside any guarded step. Decorate the function that "
                "it came from with @fit_batch, or call it through guard.run(function, ...)."
            )
        elif error is None and self._calls == 0:
            warnings.warn(
                "oomguard: this oom_guard() saw no guarded call, so it guarded nothing. Decorate the train step "
                "with @fit_batch, or call it through guard.run(step, ...).",
                OOMGuardWarning,
                stacklevel=2,
            )

    # What it knows

    @property
    def limit(self) -> int | None:
        """The largest piece still used, in items; None while there is no limit."""
        sizes = [limit.size for record in self._records.values() for limit in record.limits]
        return min(sizes, default=None)

    @property
    def report(self) -> GuardReport:
        """What happened so far."""
        limits = {r.step.name: min(limit.size for limit in r.limits) for r in self._records.values() if r.limits}
        ooms = sum(record.ooms for record in self._records.values())
        return GuardReport(self._calls, ooms, self._split_calls, limits, tuple(self._events))

    def state_dict(self) -> dict[str, Any]:
        """
        Return what was learnt, for a checkpoint.

        Example:
            >>> oom_guard().state_dict()
            {'limits': {}}
        """
        limits = {name: list(known) for name, known in self._remembered.items()}
        limits |= {record.step.name: list(record.limits) for record in self._records.values() if record.limits}
        plain = {
            name: [{"size": limit.size, "shapes": [list(shape) for shape in limit.shapes]} for limit in known]
            for name, known in limits.items()
        }
        return {"limits": plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Start with what another run has learnt.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: *state* is something else.
        """
        try:
            self._remembered = {
                name: [Limit(int(known["size"]), tuple(tuple(shape) for shape in known["shapes"])) for known in limits]
                for name, limits in state["limits"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"oomguard: load_state_dict takes what Guard.state_dict() returned, not {state!r}"
            ) from error
        for record in self._records.values():
            record.limits = self._remembered.pop(record.step.name, record.limits)

    # Running

    def run(self, step: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """
        Call *step*, guarded.

        A function that is not decorated has no declared inputs: every tensor among
        its arguments with at least one dimension, nested ones too, is taken to hold
        the batch in its first.

        Args:
            step: A decorated step, or any function of one batch.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What *step* returns; from pieces: losses joined by their weights, integers
            added, tensors with the batch dimension concatenated.

        Raises:
            BatchLimitError: Pieces of `min_batch_size` run out of memory too.
            SplitError: Memory ran out, and the step can't run in pieces, or every attempt leaves some behind.
            RestoreError: Memory ran out after something was written that has no copy.
            InputError: The arguments have no batch that can be split.

        Example:
            >>> def mean(x):
            ...     return x.mean()
            >>> with oom_guard() as guard:
            ...     guard.run(mean, torch.ones(4))
            tensor(1.)
        """
        if isinstance(step, HasStep):
            known = step.__oomguard_step__()
        else:
            known = Step(step, getattr(step, "__qualname__", type(step).__name__))
        if not self._enabled or is_running():
            return step(*args, **kwargs)
        with contextlib.nullcontext() if self._entered else self:
            return self.run_step(known, args, kwargs)  # type: ignore[no-any-return]

    def run_step(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run *step*, guarded; what a decorated call does."""
        self._calls += 1
        record = self._record_of(step, args, kwargs)
        token = ambient.set(None)  # a decorated step inside this one runs plain
        try:
            largest = self._known_limit(record, step, args, kwargs) if record.limits else None
            failure = None
            if largest is None:
                result, failure = attempt(
                    record,
                    args,
                    kwargs,
                    lambda entry: WholeRun(record.watch, entry).run(step.function, args, kwargs),
                    copy=self._policy.snapshot,
                )
                if failure is None:
                    self._passed(record)
                    return result
            return self._recover(record, step, args, kwargs, largest, failure)
        finally:
            ambient.reset(token)

    def _recover(
        self,
        record: Record,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limit: int | None,
        failure: Failure | None,
    ) -> Any:
        """Run in pieces what is over its *limit*, or has just met a *failure*."""
        require_one_rank("oom_guard")  # a group may have begun inside the block
        batch = read_batch(step.function, step.inputs, args, kwargs)
        recovery = Recovery(record, step, args, kwargs, batch, self._policy, limit=limit, tell=self._tell)
        self._split_calls += 1
        try:
            if failure is not None:
                recovery.shrink(failure)
            result = recovery.run()
        except BatchLimitError as error:
            error.report = error.report or self.report
            raise
        if recovery.ran_in_pieces:
            self._warn_of_differences(record)
        self._passed(record)
        return result

    def _passed(self, record: Record) -> None:
        """Count a good call; after enough of them, limits that were learnt from an OOM double."""
        if record.watch.strangers:
            self._warn_of_strangers(record)
        record.passed = True
        record.good += 1
        if self._grow_after is None or record.good < self._grow_after:
            return
        record.good = 0
        for limit in [limit for limit in record.limits if limit is not record.seed]:
            record.limits.remove(limit)
            grown = Limit(2 * limit.size, limit.shapes)
            if grown.size < record.largest_batch:
                record.limits.append(grown)
            self._note(
                record,
                "grown",
                record.largest_batch,
                limit.size,
                grown.size,
                f"{self._grow_after} good calls",
            )

    # What it says

    def _tell(self, recovery: Recovery, failure: Failure, old: int, new: int) -> None:
        record = recovery.record
        event = self._note(record, failure.verdict.value, recovery.batch.size, old, new, failure.text)
        _LOG.warning(
            "oomguard: %s: %s at %d items, going on with %s; peak %s of %s (%s)",
            record.step.name,
            event.kind,
            old,
            f"pieces of {new}" if new != old else "the same size, since the free memory was in fragments",
            format_bytes(event.peak_bytes),
            format_bytes(event.capacity_bytes),
            textwrap.shorten(failure.text, 100, placeholder=" ..."),
        )

    def _note(self, record: Record, kind: str, size: int, old: int, new: int, reason: str) -> GuardEvent:
        memory = memory_of(record.device)
        event = GuardEvent(
            self._calls,
            record.step.name,
            kind,
            size,
            old,
            new,
            memory.peak_bytes(),
            memory.capacity_bytes,
            reason,
        )
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)
        return event

    def _warn_of_differences(self, record: Record) -> None:
        """Say once what pieces can't keep equal."""
        if self._warned:
            return
        training = [module for _, module in record.watch.found.modules if module.training]
        norms = any(getattr(module, "track_running_stats", False) for module in training)
        dropout = any(isinstance(module, _DROPOUT) and module.p > 0 for module in training)
        if norms or dropout:
            self._warned = True
            what = " and ".join(["batch-norm statistics"] * norms + ["dropout masks"] * dropout)
            warnings.warn(
                f"oomguard: {record.step.name} ran in pieces, and {what} differ by nature from those of the whole "
                "batch: each piece has its own. Everything else of the update is the same.",
                OOMGuardWarning,
                stacklevel=_outside(),
            )

    def _warn_of_strangers(self, record: Record) -> None:
        """Say what the step changes and its code does not reveal: buffers beside it would not come back."""
        count, record.watch.strangers = record.watch.strangers, 0
        warnings.warn(
            f"oomguard: {record.step.name} trains {count} parameters that were not found from its code. They are put "
            "back after an OOM, but buffers and counters beside them are not: pass the model as oom_guard(state=...).",
            OOMGuardWarning,
            stacklevel=_outside(),
        )

    # What it looks up

    def _record_of(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
        if step.identity is None:
            step.identity = _identity(step.function)
        key = step.identity
        record = self._records.get(key)
        if record is None:
            batch = read_batch(step.function, step.inputs, args, kwargs)  # the first call says what can't be split
            record = Record(step, self._watch(step, args, kwargs), batch.device)
            record.limits += self._remembered.pop(step.name, [])
            self._records[key] = record
        elif not record.watch.is_current():
            earlier = record.watch
            record.watch = self._watch(step, args, kwargs, earlier.missed)
            record.watch.follow(earlier)
        if step.limit is not record.seed:
            known = [limit for limit in record.limits if limit is not record.seed]
            record.seed = step.limit
            record.limits = known if step.limit is None else [*known, step.limit]
        return record

    def _watch(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], missed: Sequence[object] = ()) -> Watch:
        extra = [thing for thing in (step.state, self._state, *missed) if thing is not None]
        arguments = [value for value in (*args, *kwargs.values()) if not may_hold_batch(value)]
        watch = Watch(step.function, extra, arguments)
        require_own_backward(step.name, watch.found.modules)
        if watch.found.iterators:
            raise InputError(
                f"oomguard: {step.name} takes from an iterator, {watch.found.iterators[0]!r}: what one attempt takes "
                "from it is gone for the next. Take the batch in the loop and pass it as an argument."
            )
        return watch

    def _known_limit(self, record: Record, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the largest piece that is known to fit if this call is over it."""
        # Reading a batch takes longer than the rest of a guarded call, and most calls are of the same shapes.
        if record.read_for != record.limits:
            record.read, record.read_for = {}, list(record.limits)
        key = (*map(_shape, args), *kwargs, *map(_shape, kwargs.values()))
        if key in record.read:
            return record.read[key]
        batch = read_batch(step.function, step.inputs, args, kwargs)
        record.largest_batch = max(record.largest_batch, batch.size)
        size = min((limit.size for limit in record.limits if limit.holds_for(batch.shapes)), default=batch.size)
        known = size if size < batch.size else None
        if None not in key:
            record.read[key] = known
        return known


def oom_guard(
    *,
    min_batch_size: int = 1,
    update: Literal["whole", "each"] = "whole",
    reduction: Literal["mean", "sum"] | Callable[..., float] = "mean",
    state: object = None,
    snapshot: bool = False,
    on_event: Callable[[GuardEvent], object] | None = None,
    grow_after: int | None = None,
    enabled: bool = True,
) -> Guard:
    """
    Guard the decorated steps of a `with` block against running out of memory.

    A step that runs out is undone, the cache is emptied, and the same batch runs
    again in pieces half as large, down to *min_batch_size*. The update is the one
    that the whole batch gives, also when it stands inside the step.

    Args:
        min_batch_size: The smallest piece, in items. 2 for models with batch norm,
            which refuses a batch of 1.
        update: "whole": one update from all pieces. "each": every piece is a step of
            its own with its own update, for steps that can't be held back.
        reduction: What the loss is of its items: their "mean" or "sum". For losses
            over something else (tokens), a function that takes what the step takes
            and returns the count that its loss is divided by.
        state: What the step changes and can't be found from its code: one object, or
            a sequence or mapping of them.
        snapshot: Keep a host copy of the state in every call, so that an OOM in the
            middle of an update can be undone too. Costs a copy a call.
        on_event: Called with every `GuardEvent`.
        grow_after: Good calls after which a limit doubles; None: it stays.
        enabled: False makes the guard do nothing.

    Returns:
        The guard, to be entered.

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> import oomguard.testing
        >>> weight, x = torch.ones(4, requires_grad=True), torch.ones(6, 4)
        >>> def step(x):
        ...     loss = (x * weight).sum(1).mean()
        ...     loss.backward()
        ...     return loss.detach()
        >>> with oomguard.testing.simulate_oom(fail_at=1), oom_guard() as guard:
        ...     loss = guard.run(step, x)
        >>> float(loss), weight.grad, guard.limit
        (4.0, tensor([1., 1., 1., 1.]), 3)

    Note:
        Batch-norm statistics and dropout masks of pieces differ by nature from those
        of the whole batch; the guard warns once.
    """
    policy = Policy(min_batch_size, update, reduction, snapshot)
    if grow_after is not None and (isinstance(grow_after, bool) or not isinstance(grow_after, int) or grow_after < 1):
        raise ValueError(f"oomguard: grow_after must be None or a whole number of at least 1, got {grow_after!r}")
    if on_event is not None and not callable(on_event):
        raise ValueError(f"oomguard: on_event must be callable, got {on_event!r}")
    return Guard(policy=policy, state=state, on_event=on_event, grow_after=grow_after, enabled=enabled)


def current_guard() -> Guard | None:
    """
    Return the innermost guard whose `with` block is running here, or None.

    Example:
        >>> with oom_guard(enabled=False):
        ...     print(current_guard())
        None
    """
    guard = ambient.get()
    return guard if isinstance(guard, Guard) else None


def _identity(function: Callable[..., Any]) -> tuple[object, ...]:
    """
    Return what a step is known by: its code, what it closes over, and what it is bound to.

    A lambda that a loop makes anew for every batch is the same step each time.
    """
    inner = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", None)
    code = getattr(inner, "__code__", None)
    if code is None:
        return (id(function),)  # which the record keeps alive
    return (code, id(owner), *map(id, inner.__closure__ or ()))


def _outside() -> int:
    """Return the `stacklevel` of the first frame that is the user's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def _shape(argument: object) -> object:
    """Return what says how large *argument* is; None where that takes a closer look."""
    if isinstance(argument, torch.Tensor):
        return argument.shape
    return "" if argument is None or isinstance(argument, bool | int | float | str) else None
