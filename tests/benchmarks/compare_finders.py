"""
Batch size finders on the same step and the same card: `python tests/benchmarks/compare_finders.py`.

The card is the fake GPU, so that the allocator and its errors are PyTorch's own and no
card is needed; `--real` uses the one that is there. The true maximum is found by
bisection on the same allocator. Each step and card has a process of its own; the
finders follow each other in it. The peers are the extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CAPACITIES = ["8GiB", "16GiB", "80GiB"]


def measure(case_name: str, capacity: str) -> None:
    """Run all finders on one step, and print a line of JSON for each."""
    from finders import CASES, FINDERS  # noqa: PLC0415 - only the child has a GPU

    case = CASES[case_name]()
    case.run(2)  # libraries take their workspaces
    truth = case.true_maximum()
    above = 1 << truth.bit_length()
    for name, find in FINDERS.items():
        case.reset()
        started, error = time.perf_counter(), ""
        try:
            answer = find(case, above)
        except Exception as caught:  # noqa: BLE001 - a finder that fails is a result
            answer, error = 0, f"{type(caught).__name__}: {caught}".splitlines()[0][:80]
        seconds = time.perf_counter() - started
        row = {
            "case": case_name,
            "capacity": capacity,
            "finder": name,
            "truth": truth,
            "answer": answer,
            "steps": case.steps,
            "samples": case.samples,
            "ooms": case.ooms,
            "seconds": seconds,
            "error": error,
        }
        print(json.dumps(row), flush=True)
    os._exit(0)


def rows_of(case_name: str, capacity: str, *, real: bool) -> list[dict[str, Any]]:
    """Measure one step on one card, in a child."""
    from oomguard.testing import fake_gpu  # noqa: PLC0415 - the child needs no second import of torch

    environment = {**os.environ} if real else fake_gpu.environment(capacity)
    command = [sys.executable, __file__, "--child", case_name, capacity]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        print(f"{case_name} on {capacity}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return one line for each step, card and finder."""
    heading = (
        f"{'step':24}{'card':>7}  {'finder':20}{'answer':>8}{'share':>8}{'steps':>7}{'samples':>10}{'OOMs':>6}{'s':>8}"
    )
    lines = [heading]
    for row in rows:
        start = f"{row['case']:24}{row['capacity']:>7}  {row['finder']:20}"
        if row["answer"] is None:
            lines.append(f"{start}{'-':>8}")
            continue
        share = row["answer"] / row["truth"]
        counts = f"{row['steps']:7}{row['samples']:10}{row['ooms']:6}{row['seconds']:8.1f}"
        lines.append(f"{start}{row['answer']:8}{share:8.3f}{counts}  {row['error']}".rstrip())
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return one line for each finder."""
    heading = ("finder", "cases", "exact", "median share", "worst", "samples / answer", "most", "no OOM", "median s")
    lines = [heading]
    for name in dict.fromkeys(row["finder"] for row in rows):
        mine = [row for row in rows if row["finder"] == name and row["answer"] is not None]
        if not mine:
            continue
        shares = [row["answer"] / row["truth"] for row in mine]
        costs = [row["samples"] / row["truth"] for row in mine]
        lines.append(
            (
                name,
                str(len(mine)),
                f"{sum(row['answer'] == row['truth'] for row in mine) / len(mine):.0%}",
                f"{statistics.median(shares):.3f}",
                f"{min(shares):.3f}",
                f"{statistics.median(costs):.1f}",
                f"{max(costs):.1f}",
                f"{sum(row['ooms'] == 0 for row in mine) / len(mine):.0%}",
                f"{statistics.median(row['seconds'] for row in mine):.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw for each finder its share of the true maximum, and what it processed, a point for each case."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - the extra `plot`

    names = list(dict.fromkeys(row["finder"] for row in rows))[::-1]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for y, name in enumerate(names):
        mine = [row for row in rows if row["finder"] == name and row["answer"] is not None]
        colour = "tab:blue" if name.startswith("oomguard") else "0.45"
        for axes, values in (
            (left, [row["answer"] / row["truth"] for row in mine]),
            (right, [row["samples"] / row["truth"] for row in mine]),
        ):
            axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.35, markersize=5, markeredgewidth=0)
            axes.plot(statistics.median(values), y, "|", color=colour, markersize=16, markeredgewidth=2)
    left.axvline(1, color="tab:green", linewidth=1, alpha=0.7)
    left.set(xlabel="answer / true maximum", xlim=(0, None))
    right.set(xlabel="samples processed / true maximum", xscale="log")
    left.set_yticks(range(len(names)), names)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--case", action="append", help="only this step; may be given several times")
    parser.add_argument("--capacity", action="append", help="only this card; may be given several times")
    parser.add_argument("--real", action="store_true", help="on the card that is there")
    parser.add_argument("--save", help="write the rows to this file, as JSON")
    parser.add_argument("--load", help="read the rows from this file instead of measuring")
    parser.add_argument("--plot", help="draw a picture to this file")
    options = parser.parse_args()
    if options.child:
        measure(*options.child)
    if options.load:
        rows = json.loads(Path(options.load).read_text())
    else:
        from finders import CASES  # noqa: PLC0415 - imports torchvision

        rows = []
        for case_name in options.case or CASES:
            for capacity in ["the real one"] if options.real else options.capacity or CAPACITIES:
                rows += rows_of(case_name, capacity, real=options.real)
    if options.save:
        Path(options.save).write_text(json.dumps(rows))
    print(table(rows))
    print()
    print(summary(rows))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
