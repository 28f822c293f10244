"""
The searches of a probe: which sizes are tried, and in what order.

Sizes count in units of one item or of `multiple_of` items, from 1 to a cap (None: no
end). The answer is a size that has run, or 0 where nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from oomguard.memory.replay import Replay
from oomguard.memory.trace import Trace

_MISSES = 6  # predictions that may not run before sizes are bisected
_STEP_DOWN = 0.004  # of the size, after the first of them; then twice that, and so on
_CLIMBS = 2  # larger predictions that are run after one that has run
_NEAR = 1.2  # a trace at less than this many times the largest one tells nothing new
_LEAP = 32  # times the largest trace, at most, from one trace to the next: what is small at first may grow faster
_CLOSE = 0.97  # of what is predicted, for the trace that settles a doubt
_SURE = 1.25  # a prediction of more than this many times the cap need not be corrected
_TRACED_STEPS = 2  # the first, in which an optimizer's state appears, and one as all later ones
_ROUNDED = 10  # a size is rounded to the largest power of two of which it is at least this many times
_PATIENCE = 64  # times the first size, at most, to find two traces that agree where only a model is wanted
_LINE = 2  # traces that a line needs


class Trials(Protocol):
    """What a search asks of the trials of a probe."""

    traces: dict[int, Trace]  # of those that fit and could be traced, by size

    def run(self, size: int, steps: int | None = None) -> bool:
        """Run the step at *size*, in full or for fewer *steps*, and tell whether it fits."""

    def predict(self, model: Replay, guess: int) -> int:
        """Return the largest size that *model* says fits, looking from *guess* on."""

    def remark(self, text: str) -> None:
        """Note something that the report should say."""


def double(trials: Trials, start: int, cap: int | None) -> int:
    """Double from *start* until a size does not fit; return the last that did."""
    return _bracket(trials.run, start, cap)[0]


def bisect(trials: Trials, start: int, cap: int | None) -> int:
    """Double, then halve the interval between the last size that fits and the first that does not."""
    return _between(trials.run, *_bracket(trials.run, start, cap))


def replay(trials: Trials, start: int, cap: int | None) -> int:
    """
    Trace small sizes, predict the largest that fits, and run it.

    Libraries choose other kernels at small sizes, so traces at a quarter and at a half
    of what is predicted correct the prediction. Only then it is run, in full. Where it
    does not run, smaller sizes are tried; where traces can't be made or do not agree,
    sizes are bisected, and the report says so.
    """
    size = start if cap is None else min(start, cap)
    while not trials.run(size, steps=1):  # libraries take their workspaces in this one
        if size == 1:
            return 0
        size, cap = size // 2, size - 1
    return _Climb(trials, cap).climb(size)


def model_of(trials: Trials, start: int) -> Replay | None:
    """Trace *start*, twice that and so on until two traces agree; return what replays them, None where none do."""
    climb = _Climb(trials, _PATIENCE * start)
    if trials.run(start, steps=1):
        climb.first_guess(start)
    return climb.model


SEARCHES: dict[str, Callable[[Trials, int, int | None], int]] = {"bisect": bisect, "double": double, "replay": replay}


def _bracket(fits: Callable[[int], bool], start: int, cap: int | None) -> tuple[int, int | None]:
    """Return the last power of two times *start* that fits, and the next one, which does not."""
    size = start if cap is None else min(start, cap)
    if not fits(size):
        while size > 1:
            size, unfit = size // 2, size
            if fits(size):
                return size, unfit
        return 0, 1
    while size != cap:
        larger = 2 * size if cap is None else min(2 * size, cap)
        if not fits(larger):
            return size, larger
        size = larger
    return size, None


def _between(fits: Callable[[int], bool], fit: int, unfit: int | None) -> int:
    """Halve the interval between a size that fits and one that does not; return the largest that does."""
    while unfit is not None and unfit - fit > 1:
        middle = (fit + unfit) // 2
        if fits(middle):
            fit = middle
        else:
            unfit = middle
    return fit


def _even(size: int) -> int:
    """Round a size down so that steps which cut their batch into a few chunks cut it evenly."""
    unit = next((unit for unit in (16, 8, 4, 2) if size >= _ROUNDED * unit), 1)
    return size // unit * unit


class _Guess(NamedTuple):
    """A predicted size, and whether the traces behind it leave no doubt."""

    size: int
    is_sure: bool


class _Climb:
    """One search by replay."""

    def __init__(self, trials: Trials, cap: int | None) -> None:
        self._trials, self._cap = trials, cap
        self._fit = 0  # the largest that has run in full
        self._unfit: int | None = None  # the smallest that did not run
        self.model: Replay | None = None  # of the largest trace

    def climb(self, size: int) -> int:
        """Return the answer, from a first *size* at which a step has run."""
        guess = self.first_guess(size)
        if guess is None:
            return self._bisect()
        if self._cap is not None and guess.size > _SURE * self._cap and self._run(self._cap):
            return self._cap
        for share in (1 / 4, 1 / 2):
            guess = self._corrected(guess, share)
        if not guess.is_sure:
            guess = self._corrected(guess, _CLOSE)
        return self._confirm(self._capped(guess.size))

    def first_guess(self, size: int) -> _Guess | None:
        """Trace *size*, twice that and so on, until two traces agree."""
        while True:
            ran = self._trace(size)
            guess = self._guess(size)
            if guess is not None:
                return guess
            if not ran:
                break
            if size == self._cap:
                return _Guess(size, is_sure=True)
            size = self._capped(2 * size)
        if self._unfit is None:
            self._trials.remark("the allocations could not be traced, so sizes were bisected")
        else:
            self._trials.remark(f"no two traces agreed up to {size}, so sizes were bisected")
        return None

    def _corrected(self, guess: _Guess, share: float) -> _Guess:
        """Trace a size at a *share* of the guess, and guess again; go there in leaps."""
        while True:
            largest = max(self._trials.traces)
            near = _even(int(self._capped(guess.size) * share))
            if near <= _NEAR * largest or not self._trace(min(near, _LEAP * largest)):
                return guess
            # An order that is new there makes the guess doubtful.
            guess = self._guess(guess.size) or _Guess(guess.size, is_sure=False)
            if near <= _LEAP * largest:
                return guess

    def _confirm(self, size: int) -> int:
        """Run what is predicted, and what the trace of that predicts; step down where it does not run."""
        misses = climbs = 0
        while misses < _MISSES:
            if self._run(size):
                guess = self._guess(size)
                climbs += 1
                if climbs > _CLIMBS or guess is None or self._capped(guess.size) <= size:
                    return size
                size = self._capped(guess.size)
            else:
                size = self._below(size, misses)
                misses += 1
                if size <= self._fit:
                    return self._bisect()
        self._trials.remark(f"{_MISSES} predictions did not run, so the sizes below were bisected")
        return self._bisect()

    def _below(self, size: int, misses: int) -> int:
        """Return what to try where *size* did not run: what its own trace tells, the first time, or a step down."""
        guess = self._guess(size)
        if misses == 0 and guess is not None and self._fit < guess.size < size:
            return guess.size
        return size - max(1, round(_STEP_DOWN * size * (1 << misses)))

    def _bisect(self) -> int:
        """Look between what has run and what has not, in full."""
        start = max(self._trials.traces, default=1)
        while self._unfit is None and self._fit != self._cap:
            self._run(self._capped(max(start, 2 * self._fit)))
        while self._fit == 0 and self._unfit is not None and self._unfit > 1:
            self._run(self._unfit // 2)
        return _between(self._run, self._fit, self._unfit)

    @property
    def _end(self) -> int | None:
        """The largest size that may be tried."""
        return self._cap if self._unfit is None else self._unfit - 1

    def _capped(self, size: int) -> int:
        return size if self._end is None else min(size, self._end)

    def _run(self, size: int, steps: int | None = None) -> bool:
        if not self._trials.run(size, steps):
            self._unfit = size if self._unfit is None else min(size, self._unfit)
            return False
        if steps is None:
            self._fit = max(self._fit, size)
        return True

    def _trace(self, size: int) -> bool:
        """Run a few steps at *size*, or in full where they do not tell what follows; say whether that made a trace."""
        ran = self._run(size, _TRACED_STEPS)
        if ran and size not in self._trials.traces:
            ran = self._run(size)
        return ran and size in self._trials.traces

    def _guess(self, near: int) -> _Guess | None:
        """Return what a replay of the largest trace says; None: there is no second one to tell how sizes grow."""
        traces = self._trials.traces
        if not traces:
            return None
        largest = traces[max(traces)]
        agreeing = [trace for trace in traces.values() if trace.order == largest.order]
        if len(agreeing) >= _LINE:
            self.model = Replay.from_traces(agreeing)
        elif self.model is not None:
            self.model = self.model.adopt(largest)
        else:  # what is freed when may vary; sizes are matched by the allocations alone
            agreeing = [trace for trace in traces.values() if trace.pools == largest.pools]
            if len(agreeing) < _LINE:
                return None
            self.model = Replay.from_traces(agreeing)
        is_sure = len(agreeing) >= _LINE and not self.model.guessed
        return _Guess(self._trials.predict(self.model, near), is_sure)
