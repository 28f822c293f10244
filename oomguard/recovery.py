"""One call of a step that does not fit: undo it, free the memory, and run its batch again in smaller pieces."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from oomguard.errors import BatchLimitError, InputError, RestoreError, SplitError
from oomguard.memory.device import memory_of
from oomguard.memory.oom import Verdict, classify, explain, is_fragmented, is_oom, let_go
from oomguard.memory.units import format_bytes
from oomguard.step.attempt import Entry, Watch
from oomguard.step.audit import Refusal
from oomguard.step.call import Limit, Step
from oomguard.step.inputs import Batch, even_sizes, join_results
from oomguard.step.pieces import PiecewiseRun, WholeRun

_T = TypeVar("_T")
_AMBIGUOUS_TRIES = 2
_RECENT = 8  # good calls after an OOM in which what is held is looked at
_LEAKS = 3  # failed attempts in a row: a library's workspaces may come up in one or two
_UPDATES = ("whole", "each")
_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Policy:
    """How a guard meets an OOM; `oom_guard` says what the options mean."""

    min_batch_size: int = 1
    update: Literal["whole", "each"] = "whole"
    reduction: Literal["mean", "sum"] | Callable[..., float] = "mean"
    snapshot: bool = False

    def __post_init__(self) -> None:
        """Refuse what is not legal, where it was given."""
        size, update, reduction = self.min_batch_size, self.update, self.reduction
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"oomguard: min_batch_size must be a whole number of at least 1, got {size!r}")
        if update not in _UPDATES:
            raise ValueError(f"oomguard: update must be one of {', '.join(map(repr, _UPDATES))}, got {update!r}")
        if reduction not in _REDUCTIONS and not callable(reduction):
            raise ValueError(f"oomguard: reduction must be 'mean', 'sum' or a function that counts, got {reduction!r}")

    def cut(self, total: int, largest: int) -> list[int]:
        """Return the sizes of the pieces of *total* items."""
        return even_sizes(total, largest, self.min_batch_size)

    def weights(self, batch: Batch, sizes: list[int]) -> list[float]:
        """Return the share of each piece in the whole gradient."""
        if self.reduction == "sum":
            return [1.0] * len(sizes)
        if self.reduction == "mean":
            counts: list[float] = [float(size) for size in sizes]
        else:
            counts = [float(self.reduction(*args, **kwargs)) for args, kwargs in batch.pieces(sizes)]
        total = sum(counts)
        if not total > 0:
            raise InputError(f"oomguard: reduction counted {counts} for pieces of {sizes}; the sum must be positive")
        return [count / total for count in counts]


@dataclass(frozen=True)
class Failure:
    """What is kept of an exception once it was let go."""

    verdict: Verdict
    text: str
    is_fragmented: bool = False
    refused: bool = False  # by the pieces: the step can't be split


@dataclass
class Record:
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
    ooms: int = 0
    growths: list[int] = field(default_factory=list)  # by how much failed attempts in a row raised what is held
    read: dict[tuple[object, ...], int | None] = field(default_factory=dict)  # by shapes, what `_known_limit` said
    read_for: list[Limit] = field(default_factory=list)  # under these limits


def attempt(
    record: Record,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    work: Callable[[Entry], Any],
    *,
    tries: int = 0,
    copy: bool = False,
) -> tuple[Any, Failure | None]:
    """
    Return what *work* returns, or why it ran out of memory, with everything back as it was.

    Note [Recover outside the except clause]: an exception holds the frames that it
    passed, and they hold the tensors of the failed attempt. Inside the `except`
    clause nothing can be freed, so only a summary leaves it, and then the exception
    is let go before anything is put back or allocated.

    Source: https://docs.pytorch.org/docs/stable/notes/faq.html, "My out of memory
    exception handler can't allocate memory".
    """
    # Asking the device takes as long as all else that a good call costs: only where memory has just run out.
    held = memory_of(record.device).allocated_bytes() if record.ooms and record.good < _RECENT else None
    entry = _with_room(record.device, lambda: Entry(record.watch, args, kwargs, copy=copy))
    try:
        result = work(entry)
    except BaseException as error:
        failure = _judge(record, error, tries)
        if failure is None:
            if tries > 0:  # what pieces have hidden comes back; a plain call is left as it failed
                _undo(entry, error)
                error.add_note(
                    f"oomguard: raised in a piece of a batch of {record.step.name} that does not fit whole. "
                    "(Batch norm refuses a piece of 1 item; oom_guard(min_batch_size=2) makes none.)"
                )
            raise
        caught = error
    else:
        entry.call_ended()
        return result, None
    try:
        let_go(caught)
        del caught
        lost = _with_room(record.device, entry.restore)
    except BaseException as error:
        if is_oom(error):
            raise RestoreError(
                f"oomguard: memory ran out in {record.step.name}, and again, with an empty cache, while it was put "
                "back as before: its state is in between. Go on from the last checkpoint.",
                list(record.watch.found.tensors.values()),
            ) from None
        _undo(entry, error)  # from the start: an interrupt must not leave anything in between
        raise
    if lost:
        entry.goes_on()  # the next time there is a copy
        raise RestoreError(
            f"oomguard: memory ran out in {record.step.name}, and what it had written by then has no copy and can't be "
            f"put back: {_some(lost)}. Go on from the last checkpoint; with "
            f"oom_guard(snapshot=True) the step is undone and run again. ({failure.text})",
            lost,
        )
    if failure.verdict is Verdict.OOM:
        record.ooms += 1
        _free(record.device)
        if held is not None:
            _require_level(record, held, memory_of(record.device).allocated_bytes())
    return None, failure


def _require_level(record: Record, before: int, now: int) -> None:
    """Stop where one attempt after the other leaves memory behind: smaller pieces can't help against that."""
    if now <= before:
        record.growths.clear()
        return
    record.growths.append(now - before)
    if len(record.growths) >= _LEAKS:
        left = ", ".join(map(format_bytes, record.growths[-_LEAKS:]))
        raise SplitError(
            f"oomguard: {record.step.name} runs out of memory, and every attempt leaves some behind once it is undone: "
            f"{left} in the last {_LEAKS}, so that {format_bytes(now)} are held now. Something that the step calls "
            "keeps tensors or exceptions: a list or a queue, a logger, a hook. Move that out of the step, or let it "
            "keep numbers (loss.item()) or copies on the host. Everything else is as it was before the attempt."
        )


def _with_room(device: torch.device, work: Callable[[], _T]) -> _T:
    """Do what can be done twice: where memory runs out, once more with an empty cache."""
    try:
        return work()
    except RuntimeError as error:
        if not is_oom(error):
            raise
        let_go(error)
    _free(device)
    return work()


def _undo(entry: Entry, error: BaseException) -> None:
    """Put everything back before *error* goes on, and let it say what could not be."""
    if classify(error) is Verdict.FATAL:
        return  # the device answers no more: a copy would raise in place of *error*
    lost = entry.restore()
    if lost:
        error.add_note(
            "oomguard: what the step had written by then has no copy and can't be put back: "
            f"{', '.join(lost)}. Go on from the last checkpoint."
        )


def _judge(record: Record, error: BaseException, tries: int) -> Failure | None:
    """Return what an exception says if a smaller piece may help, else None."""
    if isinstance(error, Refusal):
        return Failure(Verdict.NO, str(error), refused=True)
    verdict = classify(error)
    if verdict is Verdict.HOST:
        error.add_note("oomguard: this is about host memory, not the device's: a smaller batch may not help.")
    if verdict is Verdict.AMBIGUOUS and record.passed and tries <= _AMBIGUOUS_TRIES:
        verdict = Verdict.OOM if memory_of(record.device).is_short() else verdict
    if verdict not in (Verdict.OOM, Verdict.CAP):
        return None
    return Failure(verdict, explain(error), is_fragmented(error))


def _free(device: torch.device) -> None:
    """Give back what nothing holds any more; cycles of a failed attempt hold memory, too."""
    gc.collect()
    memory_of(device).empty_cache()


class Recovery:
    """
    One call whose batch does not fit whole.

    Args:
        record: What is known of the step.
        step: The step as it was called.
        args: The arguments of the call.
        kwargs: Its keyword arguments.
        batch: Their batch.
        policy: How to cut it.
        limit: The largest piece that is known to fit; None: the whole batch has just run out.
        tell: Called at every shrink with this, the failure, and the largest piece before and after.

    Attributes:
        largest: Items in the largest piece that is tried.
        ran_in_pieces: One update was made from several pieces.
    """

    def __init__(
        self,
        record: Record,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Batch,
        policy: Policy,
        *,
        limit: int | None,
        tell: Callable[[Recovery, Failure, int, int], None],
    ) -> None:
        self.record, self.batch = record, batch
        self.largest = batch.size if limit is None else limit
        self.ran_in_pieces = False
        self._step, self._args, self._kwargs = step, args, kwargs
        self._policy, self._tell = policy, tell
        self._limits = record.limits  # before this call
        self._sizes, self._texts = [self.largest], list[str]()
        self._tries = 1
        self._kept_size = False
        self._done = 0  # items whose pieces have made their own updates
        record.largest_batch = max(record.largest_batch, batch.size)

    def run(self) -> Any:
        """Run the batch in pieces, smaller ones as long as memory runs out, and return what the whole would."""
        return self._each_piece() if self._policy.update == "each" else self._whole_update()

    def shrink(self, failure: Failure) -> None:
        """Halve the largest piece, or keep it once where the memory is there but in fragments."""
        record, old, total = self.record, self.largest, self.batch.size
        self._tries += 1
        self._texts.append(failure.text)
        if failure.is_fragmented and not self._kept_size:
            self._kept_size = True
            self._tell(self, failure, old, old)
            return
        new = max(self._policy.min_batch_size, (old + 1) // 2)
        if new == old or max(self._policy.cut(total, new)) >= old:
            raise BatchLimitError(self._explain_limit())
        self.largest = new
        self._sizes.append(new)
        shapes = self.batch.shapes
        record.limits = [*(limit for limit in record.limits if limit.shapes != shapes), Limit(new, shapes)]
        record.good = 0
        self._tell(self, failure, old, new)

    def _whole_update(self) -> Any:
        """Run the batch in pieces that give one update."""
        record, batch, policy = self.record, self.batch, self._policy
        while True:
            sizes = policy.cut(batch.size, self.largest)

            def work(entry: Entry, sizes: list[int] = sizes) -> Any:
                if len(sizes) == 1:  # once more as it is
                    return WholeRun(record.watch, entry).run(self._step.function, self._args, self._kwargs)
                weights, mean = policy.weights(batch, sizes), policy.reduction == "mean"
                run = PiecewiseRun(record.watch, entry, weights, sizes, mean=mean, audited=not record.audited)
                results = run.run_all(self._step.function, batch.pieces(sizes))
                return _with_room(record.device, lambda: join_results(results, sizes, weights))

            # Nobody has seen this step in pieces yet: a full copy undoes whatever has to be refused.
            result, failure = attempt(
                record, self._args, self._kwargs, work, tries=self._tries, copy=policy.snapshot or not record.audited
            )
            if failure is None:
                if len(sizes) > 1:
                    record.audited = True
                    self.ran_in_pieces = True
                return result
            if failure.refused:
                record.limits = self._limits  # nothing was learnt: pieces are not for this step
                raise SplitError(self._explain_refusal(failure))
            self.shrink(failure)

    def _each_piece(self) -> Any:
        """Run the batch in pieces that are steps of their own: what has run stays, the rest is cut smaller."""
        record, batch, policy = self.record, self.batch, self._policy
        results: list[Any] = []
        done: list[int] = []
        while sum(done) < batch.size:
            rest = policy.cut(batch.size - sum(done), self.largest)
            args, kwargs = next(itertools.islice(batch.pieces(done + rest), len(done), None))

            def work(entry: Entry, args: tuple[Any, ...] = args, kwargs: dict[str, Any] = kwargs) -> Any:
                return WholeRun(record.watch, entry).run(self._step.function, args, kwargs)

            result, failure = attempt(record, args, kwargs, work, tries=self._tries, copy=policy.snapshot)
            if failure is None:
                results.append(result)
                done.append(rest[0])
                self._done = sum(done)
            else:
                self.shrink(failure)
        try:
            return _with_room(record.device, lambda: join_results(results, done, policy.weights(batch, done)))
        except RuntimeError as error:
            if not is_oom(error):
                raise
            raise RestoreError(
                f"oomguard: all of the batch has run in {record.step.name}, every piece with its own update, but there "
                f"is no memory to join what the pieces returned. Go on with the next batch, or return less. ({error})",
                list(record.watch.found.tensors.values()),
            ) from None

    def _explain_limit(self) -> str:
        memory = memory_of(self.record.device)
        stays = f"{self._done} items had run by then, in updates of their own, which stay. " if self._done else ""
        return (
            f"oomguard: {self.record.step.name} runs out of memory even in pieces of {self.largest} "
            f"(batch of {self.batch.size}; tried {', '.join(map(str, self._sizes))}; "
            f"peak {format_bytes(memory.peak_bytes())}, device {format_bytes(memory.capacity_bytes)}). "
            f"{stays}Smaller inputs, activation checkpointing or a smaller model may help. "
            f"The first error was: {self._texts[0]}"
        )

    def _explain_refusal(self, failure: Failure) -> str:
        name, size = self.record.step.name, self.batch.size
        why = f"ran out of memory with {size} items" if self._texts else f"has {size} items, over its limit"
        return (
            f"oomguard: {name} {why} (pieces of {self.largest} were tried) and can't run in pieces as one update: "
            f"{failure.text}. Move that out of the step, use a smaller batch, or let every piece be a step of its "
            f"own with oom_guard(update='each'). Everything is as it was before the step."
        )


def _some(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
