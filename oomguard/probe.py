"""
The probe before training: trials of the real step on dummy data.

A trial runs the step at one size and says whether it fits; a search decides
which sizes are tried.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oomguard.errors import BatchLimitError, InputError
from oomguard.memory.device import DeviceMemory, memory_of
from oomguard.memory.oom import Verdict, classify, explain, let_go
from oomguard.memory.replay import Replay, extend
from oomguard.memory.trace import NEVER, Trace
from oomguard.memory.units import format_bytes, parse_bytes
from oomguard.ranks import require_one_rank, require_own_backward
from oomguard.report import FitReport, Trial
from oomguard.search import SEARCHES
from oomguard.step.call import Limit, Shapes, Step, ambient
from oomguard.step.inputs import make_dummy, read_batch
from oomguard.step.state import Found, Saved, find_state

_LOG = logging.getLogger("oomguard")
_CURVE_POINTS = 12  # of the predicted memory in a report


@dataclass(frozen=True)
class Plan:
    """The options of a probe; `fit_batch` says what they mean."""

    inputs: Mapping[str, Any]
    state: object = None
    device: torch.device | str | None = None
    start: int = 2
    max_batch_size: int | None = None
    dataset_size: int | None = None
    headroom: float = 0.05
    steps_per_trial: int = 3
    search: str = "replay"
    multiple_of: int = 1
    progress: bool | None = None
    capacity: int | str | None = None

    def __post_init__(self) -> None:
        """Refuse what is not legal, where it was given."""
        for name in ("start", "steps_per_trial", "multiple_of"):
            _check_count(name, getattr(self, name))
        for name in ("max_batch_size", "dataset_size"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if isinstance(self.headroom, bool) or not isinstance(self.headroom, int | float) or not 0 <= self.headroom < 1:
            raise ValueError(
                f"oomguard: headroom is the fraction of the device's memory that stays free, from 0 to less than 1, "
                f"got {self.headroom!r}"
            )
        if self.search not in SEARCHES:
            legal = ", ".join(map(repr, sorted(SEARCHES)))
            raise ValueError(f"oomguard: search must be one of {legal}, got {self.search!r}")
        if self.max_batch_size is not None and self.max_batch_size < self.start:
            raise ValueError(
                f"oomguard: max_batch_size={self.max_batch_size} is less than start={self.start}: "
                "nothing could be tried; lower start or raise max_batch_size"
            )
        if self.cap is not None and self.cap < self.multiple_of:
            raise ValueError(
                f"oomguard: no multiple of multiple_of={self.multiple_of} is within the largest size {self.cap}"
            )
        if self.device is not None:
            torch.device(self.device)
        parse_bytes(1 if self.capacity is None else self.capacity)

    @property
    def capacity_bytes(self) -> int | None:
        """What the device is taken to have; None: what it has."""
        return None if self.capacity is None else parse_bytes(self.capacity)

    @property
    def cap(self) -> int | None:
        """The largest size that may be tried."""
        return min((size for size in (self.max_batch_size, self.dataset_size) if size is not None), default=None)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"oomguard: {name} must be a whole number of at least 1, got {value!r}")


def probe(step: Step, plan: Plan) -> FitReport:
    """
    Find the largest batch of *step* that fits, and leave everything as it was.

    Args:
        step: The user's step with its declared inputs.
        plan: The options.

    Returns:
        The report; its `batch_size` has run.

    Raises:
        BatchLimitError: Not even the smallest size fits.
        RankError: There are several ranks.
        InputError: The step takes its data from an iterator, or does nothing with its inputs.
    """
    with trials_of(step, plan) as trials:
        unit = plan.multiple_of  # sizes are counted in it, so that every size tried is a multiple
        cap = None if plan.cap is None else plan.cap // unit
        answer = unit * SEARCHES[plan.search](trials, max(1, plan.start // unit), cap)
    report = trials.report(answer)
    if answer == 0:
        raise BatchLimitError(trials.explain_nothing_fits(), report)
    step.limit = Limit(answer, trials.shapes)
    return report


@contextlib.contextmanager
def trials_of(step: Step, plan: Plan) -> Iterator[StepTrials]:
    """
    Open the trials of *step*; when they are over, leave everything as it was.

    Args:
        step: The user's step with its declared inputs.
        plan: The options.

    Raises:
        RankError: There are several ranks.
        InputError: The step takes its data from an iterator.
    """
    require_one_rank("a probe")
    found = find_state(step.function, plan.state)
    require_own_backward(step.name, found.modules)
    if found.iterators:
        raise InputError(
            f"oomguard: {step.name} takes from an iterator, {found.iterators[0]!r}: what a probe took from it could "
            "not be put back. Take the batch outside and pass it as an argument."
        )
    device = _device_of(plan, found)
    held = sum(t.nbytes for t in found.tensors if t.device == device) if device.type == "cpu" else 0
    saved = Saved(found)
    memory = memory_of(device, capacity_bytes=plan.capacity_bytes, held_bytes=held)
    trials = StepTrials(step, plan, memory, saved)
    token = ambient.set(None)  # a guard would hide what does not fit
    try:
        yield trials
    finally:
        ambient.reset(token)
        trials.close()


def _device_of(plan: Plan, found: Found) -> torch.device:
    if plan.device is not None:
        device = torch.device(plan.device)
    elif found.devices:
        device = found.devices[0]
    elif found.tensors:  # the model is on the CPU, so the step is too
        device = torch.device("cpu")
    elif torch.accelerator.is_available():  # a CUDA build without a driver has an accelerator that is none
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    else:
        device = torch.device("cpu")
    if device.type not in ("cpu", "mps") and device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return device


class StepTrials:
    """
    The trials of one step, in the order tried; sizes count in units of the plan's multiple.

    Attributes:
        traces: Of the sizes that could be traced.
        shapes: Of one item of the inputs.
        device: Where the step runs.
    """

    def __init__(self, step: Step, plan: Plan, memory: DeviceMemory, saved: Saved) -> None:
        self._step, self._plan, self._memory, self._saved = step, plan, memory, saved
        self._budget_bytes = memory.budget_bytes(plan.headroom)
        self._limit_bytes = memory.limit_bytes()
        self._trials: list[Trial] = []
        self._remarks: list[str] = []
        self._model: Replay | None = None  # the last that predicted
        self._first_failure = ""
        self._proven = False  # the step was seen to do something
        self._lost = False  # the device's context is gone
        self.traces: dict[int, Trace] = {}
        self.shapes: Shapes = ()
        self.device = memory.device
        self._bar = _progress_bar(plan.progress, step.name)

    def run(self, size: int, steps: int | None = None) -> bool:
        """Run the step at *size*, in full or for fewer *steps*, and tell whether it fits."""
        in_full = self._plan.steps_per_trial
        steps = in_full if steps is None else min(steps, in_full)
        trial, trace = self._try(size * self._plan.multiple_of, steps)
        if trace is not None and (extended := extend(trace, in_full)) is not None:
            self.traces[size] = extended
        return trial.passed

    def predict(self, model: Replay, guess: int) -> int:
        """Return the largest size that *model* says fits, looking from *guess* on."""
        self._model, unit = model, self._plan.multiple_of
        limit = NEVER if self._limit_bytes is None else self._limit_bytes
        return model.largest(limit, self._budget_bytes, guess * unit, unit) // unit

    def remark(self, text: str) -> None:
        """Note something that the report should say."""
        self._remarks.append(text)

    def _try(self, size: int, steps_wanted: int) -> tuple[Trial, Trace | None]:
        """Run the step on *size* items, put back what it changed, and tell what was seen."""
        reason, caught, steps = "", None, 0
        is_traced = self._plan.search == "replay" and self._proven
        with self._memory.measure(self._budget_bytes, size if is_traced else None) as seen:
            started = time.perf_counter()
            try:
                batch = result = None
                for _ in range(steps_wanted):
                    # The old batch lives until the new one is made, as in a loop.
                    batch = make_dummy(self._plan.inputs, size, self._memory.device)
                    result = self._run(batch)
                    seen.step_ended()
                    steps += 1
            except Exception as error:
                reason = self._judge(error, size)
                if not reason:
                    raise
                caught = error
            finally:
                del batch, result
        seconds = time.perf_counter() - started
        if caught is not None:
            let_go(caught)
            del caught
            gc.collect()  # cycles of the failed attempt hold memory, too
        self._saved.restore()
        if not reason and seen.reserved_bytes > self._budget_bytes:
            reason = f"over the budget: {format_bytes(seen.reserved_bytes)} of {format_bytes(self._budget_bytes)}"
        trial = Trial(size, not reason, reason, seen.allocated_bytes, seen.reserved_bytes, seconds, steps)
        self._trials.append(trial)
        self._first_failure = self._first_failure or reason
        _LOG.info("oomguard: %s with %d items: %s", self._step.name, size, reason or "ran")
        if self._bar is not None:
            self._bar.set_postfix_str(f"{size} {'ran' if trial.passed else reason.partition(':')[0]}", refresh=False)
            self._bar.update()
        return trial, seen.trace

    def close(self) -> None:
        """Leave nothing behind."""
        if self._bar is not None:
            self._bar.close()
        if not self._lost:
            self._saved.restore()
            gc.collect()
            self._memory.empty_cache()

    def _run(self, batch: dict[str, Any]) -> Any:
        if self._proven:
            return self._step.function(**batch)
        self.shapes = read_batch(self._step.function, self._plan.inputs, (), batch).shapes
        with _Witness() as witness:
            result = self._step.function(**batch)
        if not witness.saw_work:
            raise InputError(
                f"oomguard: {self._step.name} did nothing with its inputs: no tensor operation ran, so any batch "
                "would seem to fit. Decorate the function that runs the model."
            )
        self._proven = True
        return result

    def _judge(self, error: Exception, size: int) -> str:
        """Return why this size does not fit; empty: the error is about something else."""
        verdict = classify(error)
        self._lost = verdict is Verdict.FATAL
        if self._lost:
            error.add_note("oomguard: the device's context is lost, so nothing could be put back; start a new process.")
        if verdict is Verdict.HOST:
            error.add_note("oomguard: this is about host memory, not the device's: a smaller batch may not help.")
        if verdict is Verdict.AMBIGUOUS and not any(t.passed and t.batch_size < size for t in self._trials):
            return ""
        if verdict not in (Verdict.OOM, Verdict.CAP, Verdict.AMBIGUOUS):
            return ""
        return f"{verdict.value}: {explain(error)}"

    def report(self, answer: int) -> FitReport:
        """Return what was tried and found."""
        return FitReport(
            step=self._step.name,
            device=str(self._memory.device),
            capacity_bytes=self._memory.capacity_bytes,
            budget_bytes=self._budget_bytes,
            headroom=self._plan.headroom,
            search=self._plan.search,
            batch_size=answer or None,
            ended=self._ended(answer),
            trials=tuple(self._trials),
            restored=self._saved.found.names(),
            curve=self._curve(answer),
            remarks=tuple(self._remarks),
        )

    def _curve(self, answer: int) -> tuple[tuple[int, int], ...]:
        """Return what the last prediction says of other sizes, for a picture."""
        if self._model is None:
            return ()
        largest = max(answer, *(trial.batch_size for trial in self._trials))
        sizes = sorted({max(1, round(largest * i / _CURVE_POINTS)) for i in range(_CURVE_POINTS + 2)})
        return tuple((size, self._model.run(size).reserved_bytes) for size in sizes)

    def _ended(self, answer: int) -> str:
        failed = [trial for trial in self._trials if not trial.passed and trial.batch_size > answer]
        if failed:
            nearest = min(failed, key=lambda trial: trial.batch_size)
            return f"{nearest.reason.partition(':')[0]} at {nearest.batch_size}"
        if answer != self._plan.cap and self._model is not None:
            return f"{answer + self._plan.multiple_of} would not fit, by replay"
        if answer == self._plan.dataset_size:
            return f"the data set has {answer} items"
        return (
            f"max_batch_size is {self._plan.max_batch_size}"
            if self._plan.cap == self._plan.max_batch_size
            else (f"the data set has {self._plan.dataset_size} items")
        )

    def explain_nothing_fits(self) -> str:
        """Return the message for a step that does not fit at any size."""
        sizes = ", ".join(str(trial.batch_size) for trial in self._trials)
        peak = min(trial.peak_reserved_bytes for trial in self._trials)
        return (
            f"oomguard: {self._step.name} does not fit on {self._memory.device} at any batch size "
            f"(tried {sizes}; peak {format_bytes(peak)}, budget {format_bytes(self._budget_bytes)} of "
            f"{format_bytes(self._memory.capacity_bytes)}). Smaller inputs, activation checkpointing or a smaller "
            f"model may help. The first error was: {self._first_failure}"
        )


class _Witness(TorchDispatchMode):
    """Notice whether any operation on tensors runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saw_work = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.saw_work = True
        return func(*args, **(kwargs or {}))


def _progress_bar(wanted: bool | None, name: str) -> Any:  # noqa: FBT001 - one option, passed on
    """Return a bar where tqdm is installed and a person looks on, or None."""
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        return None
    try:
        from tqdm import tqdm  # noqa: PLC0415 - optional
    except ImportError:
        if wanted:
            raise ImportError("oomguard: progress=True needs tqdm: pip install 'oomguard[progress]'") from None
        return None
    return tqdm(desc=f"oomguard: {name}", unit=" trials", leave=False, mininterval=0)
