"""What a probe and a guard have seen: plain data, and the tables and pictures of it."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomguard.memory.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True)
class Trial:
    """
    One size tried by a probe.

    Attributes:
        batch_size: Items.
        passed: It ran, and stayed within the budget.
        reason: Why it did not pass: a kind, and after a colon the error's own text.
        peak_allocated_bytes: The most that tensors took at once.
        peak_reserved_bytes: The most that the allocator held at once.
        seconds: For all its steps.
        steps: The steps that ran to their end.
    """

    batch_size: int
    passed: bool
    reason: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    seconds: float
    steps: int

    @property
    def samples_per_second(self) -> float:
        """Items per second; 0 where it did not pass."""
        return self.batch_size * self.steps / self.seconds if self.passed and self.seconds > 0 else 0.0


@dataclass(frozen=True)
class _Table:
    """A title, rows of text under a heading, and lines below."""

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def text(self) -> str:
        """Lay it out in columns, numbers to the right."""
        lines = [self.title]
        if self.rows:
            widths = [max(map(len, column)) for column in zip(self.heading, *self.rows, strict=True)]
            for row in (self.heading, *self.rows):
                cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
                lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *self.notes])

    def html(self) -> str:
        """Lay it out for a notebook."""

        def row(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row("td", cells) for cells in self.rows)
        table = f"<table>{row('th', self.heading)}{body}</table>" if self.rows else ""
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return f"<div><b>{html.escape(self.title)}</b>{table}{notes}</div>"


@dataclass(frozen=True)
class FitReport:
    """
    What a probe has found. `str()` is a table of its trials.

    Attributes:
        step: The name of the user's step.
        device: Where it ran.
        capacity_bytes: What the device has.
        budget_bytes: What the step may use of it.
        headroom: The fraction that stays free.
        search: How sizes were chosen.
        batch_size: The answer, which has run; None: nothing fits.
        ended: Why the search went no higher.
        trials: In the order tried.
        restored: What was found and put back.
        curve: Pairs of a batch size and the bytes that a replay says it reserves.
        remarks: What else should be known.
    """

    step: str
    device: str
    capacity_bytes: int
    budget_bytes: int
    headroom: float
    search: str
    batch_size: int | None
    ended: str
    trials: tuple[Trial, ...]
    restored: tuple[str, ...]
    curve: tuple[tuple[int, int], ...] = ()
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Lay the trials out as a table."""
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold."""
        return dataclasses.asdict(self)

    def plot(self, path: str | Path | None = None) -> Figure:
        """
        Draw memory against batch size, with the budget and the answer.

        Args:
            path: Where to save the picture; its ending says the format.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed: `pip install 'oomguard[plot]'`.
        """
        figure, axes = _figure()
        factor = _draw_memory(axes, self.curve, self.capacity_bytes, self.budget_bytes, self.batch_size)
        for passed, name, marker, colour in (
            (True, "ran (peak reserved)", "o", "tab:blue"),
            (False, "did not run", "x", "tab:red"),
        ):
            shown = [trial for trial in self.trials if trial.passed is passed]
            if shown:
                x = [trial.batch_size for trial in shown]
                y = [trial.peak_reserved_bytes / factor for trial in shown]
                axes.plot(x, y, marker, color=colour, label=name)
        axes.set_title(f"{self.step} on {self.device}")
        return _finish(figure, axes, path)

    def _table(self) -> _Table:
        unit, factor = _unit_of(
            max(trial.peak_reserved_bytes for trial in self.trials) if self.trials else self.budget_bytes
        )

        def memory(size_bytes: int) -> str:
            return f"{size_bytes / factor:.2f} {unit}"

        # The last at this size: earlier ones may have run fewer steps.
        answering = next((t for t in reversed(self.trials) if t.passed and t.batch_size == self.batch_size), None)
        rows = [
            [
                str(trial.batch_size),
                str(trial.steps),
                "ran" if trial.passed else trial.reason.partition(":")[0],
                memory(trial.peak_allocated_bytes),
                memory(trial.peak_reserved_bytes),
                f"{trial.peak_reserved_bytes / self.capacity_bytes:.0%}",
                f"{trial.seconds:.2f}",
                f"{trial.samples_per_second:.1f}" if trial.passed else "-",
                "<- answer" if trial is answering else "",
            ]
            for trial in self.trials
        ]
        answer = "nothing fits" if self.batch_size is None else f"batch size {self.batch_size}"
        count = f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)}"
        budget = f"budget {format_bytes(self.budget_bytes)} of {format_bytes(self.capacity_bytes)}"
        notes = [f"{budget} (headroom {self.headroom:g}); ended: {self.ended}", f"restored: {', '.join(self.restored)}"]
        first = next((t.reason.partition(": ")[2] for t in self.trials if not t.passed and ": " in t.reason), "")
        return _Table(
            f"{self.step} on {self.device}: {answer} (search: {self.search}, {count})",
            ["batch size", "steps", "result", "allocated", "reserved", "of device", "seconds", "samples/s", ""],
            rows,
            [*notes, *self.remarks, *[f"first error: {_shortened(first)}"] * bool(first)],
        )


@dataclass(frozen=True)
class Prediction:
    """
    What a step would need on a device that is not there. `str()` says it in words.

    Attributes:
        step: The name of the user's step.
        traced_on: Where its small steps ran.
        traced_sizes: Their batch sizes.
        capacity_bytes: What the device has.
        budget_bytes: What the step may use of it.
        headroom: The fraction that stays free.
        largest: The largest batch that would fit; 0: none.
        batch_size: The size that the peaks are of: the one asked for, or the largest.
        fits: It would fit.
        peak_allocated_bytes: The most that tensors would take at once.
        peak_reserved_bytes: The most that the allocator would hold at once.
        guessed: Allocations whose growth is a guess.
        curve: Pairs of a batch size and the bytes that it would reserve.
    """

    step: str
    traced_on: str
    traced_sizes: tuple[int, ...]
    capacity_bytes: int
    budget_bytes: int
    headroom: float
    largest: int
    batch_size: int
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    guessed: int
    curve: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        """Say what is predicted, and from what."""
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold."""
        return dataclasses.asdict(self)

    def plot(self, path: str | Path | None = None) -> Figure:
        """
        Draw predicted memory against batch size, with the budget.

        Args:
            path: Where to save the picture; its ending says the format.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed: `pip install 'oomguard[plot]'`.
        """
        figure, axes = _figure()
        _draw_memory(axes, self.curve, self.capacity_bytes, self.budget_bytes, self.largest)
        axes.set_title(f"{self.step}, predicted")
        return _finish(figure, axes, path)

    def _table(self) -> _Table:
        allocated, reserved = format_bytes(self.peak_allocated_bytes), format_bytes(self.peak_reserved_bytes)
        budget = f"budget {format_bytes(self.budget_bytes)} of {format_bytes(self.capacity_bytes)}"
        rows = [
            f"peak allocated {allocated}, reserved {reserved}; the largest that would fit: {self.largest}",
            f"{budget} (headroom {self.headroom:g})",
            f"from steps of {' and '.join(map(str, self.traced_sizes))} items on {self.traced_on}; it has not run",
        ]
        answer = (
            f"{self.batch_size} items would {'' if self.fits else 'not '}fit" if self.batch_size else "nothing fits"
        )
        guesses = [f"the growth of {self.guessed} allocations is a guess"] * bool(self.guessed)
        return _Table(f"{self.step}: {answer}", [], [], [*rows, *guesses])


@dataclass(frozen=True)
class GuardEvent:
    """
    A change of the largest piece that a guard uses.

    Attributes:
        call: The number of the guarded call, from 1.
        step: The name of the step.
        kind: "out of memory", "size limit", or "grown".
        batch_size: Items in the call.
        old_size: The largest piece before, in items.
        new_size: The largest piece from now on.
        peak_bytes: The peak until then.
        capacity_bytes: What the device has.
        reason: The first line of the error.
    """

    call: int
    step: str
    kind: str
    batch_size: int
    old_size: int
    new_size: int
    peak_bytes: int
    capacity_bytes: int
    reason: str


@dataclass(frozen=True)
class GuardReport:
    """
    What a guard has done. `str()` is a table of its events.

    Attributes:
        calls: Guarded calls.
        ooms: Out-of-memory errors met.
        split_calls: Calls that ran in more than one piece.
        limits: The largest piece still used, by the name of the step.
        events: In the order met.
    """

    calls: int
    ooms: int
    split_calls: int
    limits: Mapping[str, int]
    events: tuple[GuardEvent, ...]

    def __str__(self) -> str:
        """Lay the events out as a table."""
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that JSON can hold."""
        return {**dataclasses.asdict(self), "limits": dict(self.limits)}

    def plot(self, path: str | Path | None = None) -> Figure:
        """
        Draw the largest piece over the guarded calls, one line a step.

        Args:
            path: Where to save the picture; its ending says the format.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed: `pip install 'oomguard[plot]'`.
        """
        figure, axes = _figure()
        for name in dict.fromkeys(event.step for event in self.events):
            events = [event for event in self.events if event.step == name]
            x = [1, *(event.call for event in events), self.calls]
            y = [events[0].old_size, *(event.new_size for event in events), events[-1].new_size]
            (line,) = axes.step(x, y, where="post", label=name)
            ran_out = [event for event in events if event.kind != "grown"]
            axes.plot(
                [event.call for event in ran_out],
                [event.new_size for event in ran_out],
                "x",
                color=line.get_color(),
                label=f"{name}: ran out",
            )
        axes.set_ylim(bottom=0)
        axes.set(xlabel="guarded call", ylabel="largest piece (items)", title=self._title())
        return _finish(figure, axes, path)

    def _title(self) -> str:
        return (
            f"{self.calls} guarded call{'s' * (self.calls != 1)}: {self.ooms} out-of-memory "
            f"error{'s' * (self.ooms != 1)} met, {self.split_calls} run in pieces"
        )

    def _table(self) -> _Table:
        unit, factor = _unit_of(max((event.capacity_bytes for event in self.events), default=0))
        rows = [
            [
                str(event.call),
                event.step,
                event.kind,
                str(event.batch_size),
                f"{event.old_size} -> {event.new_size}",
                f"{event.peak_bytes / factor:.2f} {unit}",
                f"{event.capacity_bytes / factor:.2f} {unit}",
            ]
            for event in self.events
        ]
        notes = [f"largest piece of {name}: {size}" for name, size in self.limits.items()]
        heading = ["call", "step", "event", "batch size", "largest piece", "peak", "device"]
        return _Table(
            self._title(), heading, rows, notes + [f"first error: {_shortened(e.reason)}" for e in self.events[:1]]
        )


def _shortened(text: str) -> str:
    """Leave out the advice that follows what happened."""
    return textwrap.shorten(text, 110, placeholder=" ...")


def _unit_of(size_bytes: int) -> tuple[str, int]:
    """Return the unit for a whole table: the largest in which *size_bytes* is at least 1."""
    return next(((unit, factor) for unit, factor in _UNITS if size_bytes >= factor), _UNITS[-1])


def _draw_memory(
    axes: Axes, curve: Sequence[tuple[int, int]], capacity_bytes: int, budget_bytes: int, answer: int | None
) -> int:
    """Draw the curve, the lines that bound it and the answer; return the bytes that the axis counts in."""
    unit, factor = _unit_of(capacity_bytes)
    if curve:
        x, y = zip(*curve, strict=True)
        axes.plot(x, [size / factor for size in y], color="tab:blue", linewidth=1, alpha=0.6, label="replay")
    axes.axhline(capacity_bytes / factor, color="0.3", linewidth=1, label="capacity")
    axes.axhline(budget_bytes / factor, color="tab:orange", linewidth=1, linestyle="--", label="budget")
    if answer:
        axes.axvline(answer, color="tab:blue", linewidth=1, alpha=0.4)
        axes.annotate(
            str(answer), (answer, 0), xytext=(-4, 6), textcoords="offset points", ha="right", color="tab:blue"
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="batch size", ylabel=f"memory ({unit})")
    return factor


def _figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        raise ImportError("oomguard: plots need matplotlib: pip install 'oomguard[plot]'") from None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    return figure, figure.add_subplot()


def _finish(figure: Figure, axes: Axes, path: str | Path | None) -> Figure:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
