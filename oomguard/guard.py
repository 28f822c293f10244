"""
The run-time guard: an OOM in mid-training is met by running the same batch in smaller pieces.

A `with` body can't be run twice, so what is retried is a call: of a step that
`fit_batch` has decorated, or of any function through `Guard.run`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from torch import nn

from oomguard.errors import BatchLimitError, InputError, OOMGuardWarning, RestoreError, SplitError
from oomguard.memory.device import memory_of
from oomguard.memory.oom import Verdict, classify, explain, is_fragmented, is_oom, let_go
from oomguard.memory.units import format_bytes
from oomguard.ranks import require_one_rank
from oomguard.report import GuardEvent, GuardReport
from oomguard.step.attempt import Entry, Watch
from oomguard.step.audit import Refusal
from oomguard.step.call import HasStep, Limit, Runner, Step, ambient
from oomguard.step.inputs import Batch, even_sizes, join_results, may_hold_batch, read_batch
from oomguard.step.pieces import PiecewiseRun, WholeRun, intercepted, is_running

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = str(Path(__file__).parent)
_LOG = logging.getLogger("oomguard")
_AMBIGUOUS_TRIES = 2
_DROPOUT = (nn.modules.dropout._DropoutNd,)
_UPDATES = ("whole", "each")
_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class _Failure:
    """What is kept of an exception once it was let go."""

    verdict: Verdict
    text: str
    is_fragmented: bool = False
    refused: bool = False  # by the pieces: the step can't be split


@dataclass
class _Record:
    """What a guard has learnt of one step."""

    step: Step
    watch: Watch
    device: torch.device
    limits: list[Limit] = field(default_factory=list)
    seed: Limit | None = None  # the limit that a probe has found
    largest_batch: int = 0
    passed: bool = False
    audited: bool = False
    good: int = 0  # calls since the last event
    read: dict[tuple[object, ...], int | None] = field(default_factory=dict)  # by shapes, what `_known_limit` said
    read_for: list[Limit] = field(default_factory=list)  # under these limits


@dataclass
class _Recovery:
    """One call that does not fit whole."""

    record: _Record
    step: Step
    batch: Batch
    largest: int  # items in the largest piece that is tried
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)  # before this call
    tries: int = 1
    kept_size: bool = False

    def __post_init__(self) -> None:
        self.sizes.append(self.largest)
        self.limits = self.record.limits
        self.record.largest_batch = max(self.record.largest_batch, self.batch.size)


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
        min_batch_size: int,
        update: Literal["whole", "each"],
        reduction: Literal["mean", "sum"] | Callable[..., float],
        state: object,
        snapshot: bool,
        on_event: Callable[[GuardEvent], object] | None,
        grow_after: int | None,
        enabled: bool,
    ) -> None:
        self._min_batch_size, self._update, self._reduction = min_batch_size, update, reduction
        self._state, self._snapshot, self._on_event = state, snapshot, on_event
        self._grow_after, self._enabled = grow_after, enabled
        self._records: dict[Any, _Record] = {}
        self._remembered: dict[str, list[Limit]] = {}  # from load_state_dict, for steps not met yet
        self._events: list[GuardEvent] = []
        self._calls = self._ooms = self._split_calls = 0
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
        return GuardReport(self._calls, self._ooms, self._split_calls, limits, tuple(self._events))

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
            SplitError: Memory ran out, and the step can't run in pieces.
            RestoreError: Memory ran out after an update had begun that has no copy.
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
                result, failure = self._attempt(
                    record,
                    args,
                    kwargs,
                    lambda entry: WholeRun(record.watch, entry).run(step.function, args, kwargs),
                )
                if failure is None:
                    self._passed(record)
                    return result
            batch = read_batch(step.function, step.inputs, args, kwargs)
            self._split_calls += 1
            recovery = _Recovery(record, step, batch, largest or batch.size, args, kwargs)
            if failure is not None:
                self._shrink(recovery, failure)
            result = self._each_piece(recovery) if self._update == "each" else self._whole_update(recovery)
            self._passed(record)
            return result
        finally:
            ambient.reset(token)

    def _attempt(
        self,
        record: _Record,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        work: Callable[[Entry], Any],
        *,
        tries: int = 0,
        copy: bool = False,
    ) -> tuple[Any, _Failure | None]:
        """
        Return what *work* returns, or why it ran out of memory, with everything back as it was.

        Note [Recover outside the except clause]: an exception holds the frames that it
        passed, and they hold the tensors of the failed attempt. Inside the `except`
        clause nothing can be freed, so only a summary leaves it, and then the exception
        is let go before anything is put back or allocated.

        Source: https://docs.pytorch.org/docs/stable/notes/faq.html, "My out of memory
        exception handler can't allocate memory".
        """
        copy = copy or self._snapshot
        try:
            entry = Entry(record.watch, args, kwargs, copy=copy)
        except RuntimeError as error:
            if not is_oom(error):
                raise
            entry = None
        if entry is None:  # there is no room for the copies of the entry itself
            _free(record.device)
            entry = Entry(record.watch, args, kwargs, copy=copy)
        try:
            return work(entry), None
        except BaseException as error:
            failure = self._judge(record, error, tries)
            if failure is None:
                if tries > 0:  # what pieces have hidden comes back; a plain call is left as it failed
                    entry.restore()
                    error.add_note(
                        f"oomguard: raised in a piece of a batch of {record.step.name} that does not fit whole. "
                        "(Batch norm refuses a piece of 1 item; oom_guard(min_batch_size=2) makes none.)"
                    )
                raise
            caught = error
        let_go(caught)
        del caught
        lost = entry.restore()
        if lost:
            raise RestoreError(
                f"oomguard: memory ran out in {record.step.name} after its update had begun, and no copy was kept "
                f"of what it had written: {_some(lost)}. Go on from the last checkpoint; with "
                f"oom_guard(snapshot=True) the step is undone and run again. ({failure.text})"
            )
        if failure.verdict is Verdict.OOM:
            self._ooms += 1
            _free(record.device)
        return None, failure

    def _whole_update(self, recovery: _Recovery) -> Any:
        """Run the batch in pieces that give one update."""
        record, batch = recovery.record, recovery.batch
        while True:
            sizes = even_sizes(batch.size, recovery.largest, self._min_batch_size)
            weights = self._weights(batch, sizes)

            def work(entry: Entry, sizes: list[int] = sizes, weights: list[float] = weights) -> list[Any]:
                if len(sizes) == 1:  # once more as it is
                    whole = WholeRun(record.watch, entry)
                    return [whole.run(recovery.step.function, recovery.args, recovery.kwargs)]
                mean = self._reduction == "mean"
                run = PiecewiseRun(record.watch, entry, weights, sizes, mean=mean, audited=not record.audited)
                return run.run_all(recovery.step.function, batch.pieces(sizes))

            # Nobody has seen this step in pieces yet: a full copy undoes whatever has to be refused.
            results, failure = self._attempt(
                record, recovery.args, recovery.kwargs, work, tries=recovery.tries, copy=not record.audited
            )
            if failure is None:
                if len(sizes) > 1:
                    record.audited = True
                    self._warn_of_differences(record)
                return join_results(results, sizes, weights)
            if failure.refused:
                record.limits = recovery.limits  # nothing was learnt: pieces are not for this step
                raise SplitError(self._explain_refusal(recovery, failure))
            self._shrink(recovery, failure)

    def _each_piece(self, recovery: _Recovery) -> Any:
        """Run the batch in pieces that are steps of their own: what has run stays, the rest is cut smaller."""
        record, batch = recovery.record, recovery.batch
        results: list[Any] = []
        done: list[int] = []
        while sum(done) < batch.size:
            rest = even_sizes(batch.size - sum(done), recovery.largest, self._min_batch_size)
            args, kwargs = next(itertools.islice(batch.pieces(done + rest), len(done), None))

            def work(entry: Entry, args: tuple[Any, ...] = args, kwargs: dict[str, Any] = kwargs) -> Any:
                return WholeRun(record.watch, entry).run(recovery.step.function, args, kwargs)

            result, failure = self._attempt(record, args, kwargs, work, tries=recovery.tries)
            if failure is None:
                results.append(result)
                done.append(rest[0])
            else:
                self._shrink(recovery, failure)
        return join_results(results, done, self._weights(batch, done))

    def _judge(self, record: _Record, error: BaseException, tries: int) -> _Failure | None:
        """Return what an exception says if a smaller piece may help, else None."""
        if isinstance(error, Refusal):
            return _Failure(Verdict.NO, str(error), refused=True)
        verdict = classify(error)
        if verdict is Verdict.HOST:
            error.add_note("oomguard: this is about host memory, not the device's: a smaller batch may not help.")
        if verdict is Verdict.AMBIGUOUS and record.passed and tries <= _AMBIGUOUS_TRIES:
            verdict = Verdict.OOM if memory_of(record.device).is_short() else verdict
        if verdict not in (Verdict.OOM, Verdict.CAP):
            return None
        return _Failure(verdict, explain(error), is_fragmented(error))

    def _shrink(self, recovery: _Recovery, failure: _Failure) -> None:
        """Halve the largest piece, or keep it once where the memory is there but in fragments."""
        record, old = recovery.record, recovery.largest
        recovery.tries += 1
        recovery.texts.append(failure.text)
        if failure.is_fragmented and not recovery.kept_size:
            recovery.kept_size = True
            self._tell(recovery, failure, old, old)
            return
        new = max(self._min_batch_size, (old + 1) // 2)
        total = recovery.batch.size
        if new == old or max(even_sizes(total, new, self._min_batch_size)) >= old:
            raise BatchLimitError(self._explain_limit(recovery), self.report)
        recovery.largest = new
        recovery.sizes.append(new)
        shapes = recovery.batch.shapes
        record.limits = [*(limit for limit in record.limits if limit.shapes != shapes), Limit(new, shapes)]
        record.good = 0
        self._tell(recovery, failure, old, new)

    def _passed(self, record: _Record) -> None:
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

    def _tell(self, recovery: _Recovery, failure: _Failure, old: int, new: int) -> None:
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

    def _note(self, record: _Record, kind: str, size: int, old: int, new: int, reason: str) -> GuardEvent:
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

    def _explain_limit(self, recovery: _Recovery) -> str:
        memory = memory_of(recovery.record.device)
        return (
            f"oomguard: {recovery.record.step.name} runs out of memory even in pieces of {recovery.largest} "
            f"(batch of {recovery.batch.size}; tried {', '.join(map(str, recovery.sizes))}; "
            f"peak {format_bytes(memory.peak_bytes())}, device {format_bytes(memory.capacity_bytes)}). "
            "Smaller inputs, activation checkpointing or a smaller model may help. "
            f"The first error was: {recovery.texts[0]}"
        )

    def _explain_refusal(self, recovery: _Recovery, failure: _Failure) -> str:
        name, size = recovery.record.step.name, recovery.batch.size
        why = f"ran out of memory with {size} items" if recovery.texts else f"has {size} items, over its limit"
        return (
            f"oomguard: {name} {why} (pieces of {recovery.largest} were tried) and can't run in pieces as one update: "
            f"{failure.text}. Move that out of the step, use a smaller batch, or let every piece be a step of its "
            f"own with oom_guard(update='each'). Everything is as it was before the step."
        )

    def _warn_of_differences(self, record: _Record) -> None:
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

    def _warn_of_strangers(self, record: _Record) -> None:
        """Say what the step changes and its code does not reveal: buffers beside it would not come back."""
        count, record.watch.strangers = record.watch.strangers, 0
        warnings.warn(
            f"oomguard: {record.step.name} trains {count} parameters that were not found from its code. They are put "
            "back after an OOM, but buffers and counters beside them are not: pass the model as oom_guard(state=...).",
            OOMGuardWarning,
            stacklevel=_outside(),
        )

    # What it looks up

    def _record_of(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Record:
        if step.identity is None:
            step.identity = _identity(step.function)
        key = step.identity
        record = self._records.get(key)
        if record is None:
            batch = read_batch(step.function, step.inputs, args, kwargs)  # the first call says what can't be split
            record = _Record(step, self._watch(step, args, kwargs), batch.device)
            record.limits += self._remembered.pop(step.name, [])
            self._records[key] = record
        elif not record.watch.is_current():
            record.watch = self._watch(step, args, kwargs, record.watch.missed)
        if step.limit is not record.seed:
            known = [limit for limit in record.limits if limit is not record.seed]
            record.seed = step.limit
            record.limits = known if step.limit is None else [*known, step.limit]
        return record

    def _watch(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], missed: Sequence[object] = ()) -> Watch:
        extra = [thing for thing in (step.state, self._state, *missed) if thing is not None]
        arguments = [value for value in (*args, *kwargs.values()) if not may_hold_batch(value)]
        watch = Watch(step.function, extra, arguments)
        if watch.found.iterators:
            raise InputError(
                f"oomguard: {step.name} takes from an iterator, {watch.found.iterators[0]!r}: what one attempt takes "
                "from it is gone for the next. Take the batch in the loop and pass it as an argument."
            )
        return watch

    def _known_limit(self, record: _Record, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
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

    def _weights(self, batch: Batch, sizes: list[int]) -> list[float]:
        """Return the share of each piece in the whole gradient."""
        if self._reduction == "sum":
            return [1.0] * len(sizes)
        if self._reduction == "mean":
            counts: list[float] = [float(size) for size in sizes]
        else:
            counts = [float(self._reduction(*args, **kwargs)) for args, kwargs in batch.pieces(sizes)]
        total = sum(counts)
        if not total > 0:
            raise InputError(f"oomguard: reduction counted {counts} for pieces of {sizes}; the sum must be positive")
        return [count / total for count in counts]


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
    if isinstance(min_batch_size, bool) or not isinstance(min_batch_size, int) or min_batch_size < 1:
        raise ValueError(f"oomguard: min_batch_size must be a whole number of at least 1, got {min_batch_size!r}")
    if update not in _UPDATES:
        raise ValueError(f"oomguard: update must be one of {', '.join(map(repr, _UPDATES))}, got {update!r}")
    if reduction not in _REDUCTIONS and not callable(reduction):
        raise ValueError(f"oomguard: reduction must be 'mean', 'sum' or a function that counts, got {reduction!r}")
    if grow_after is not None and (isinstance(grow_after, bool) or not isinstance(grow_after, int) or grow_after < 1):
        raise ValueError(f"oomguard: grow_after must be None or a whole number of at least 1, got {grow_after!r}")
    if on_event is not None and not callable(on_event):
        raise ValueError(f"oomguard: on_event must be callable, got {on_event!r}")
    return Guard(
        min_batch_size=min_batch_size,
        update=update,
        reduction=reduction,
        state=state,
        snapshot=snapshot,
        on_event=on_event,
        grow_after=grow_after,
        enabled=enabled,
    )


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


def _free(device: torch.device) -> None:
    """Give back what nothing holds any more; cycles of a failed attempt hold memory, too."""
    gc.collect()
    memory_of(device).empty_cache()


def _identity(function: Callable[..., Any]) -> tuple[object, ...]:
    """
    Return what a step is known by: its code, what it closes over, and what it is bound to.

    A lambda that a loop makes anew for every batch is the same step each time.
    """
    inner = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", None)
    code = getattr(inner, "__code__", None)
    if code is None:
        return (function,)
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


def _some(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
