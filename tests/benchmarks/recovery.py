"""
What an out-of-memory error costs: `python tests/benchmarks/recovery.py`.

A convolutional network trains on a simulated device that holds three quarters of its
batch. The first guarded call runs out, is undone and runs again in pieces; later calls
begin with the pieces. Times are of one run, in milliseconds.
"""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from oomguard import oom_guard
from oomguard.testing import simulate_oom

BATCH = 256
ROUNDS = 9


@dataclass
class Clock:
    """When each run of the step began and ended."""

    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)


@dataclass
class Round:
    """The parts of one call that ran out, and of those after it; seconds and bytes."""

    failed: float
    recovery: float
    retry: float
    later: list[float]
    held: list[int]


def make_step() -> tuple[object, Clock]:
    """Return a train step and the clock that it keeps."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(25088, 10)
    )
    optimizer = torch.optim.Adam(model.parameters())

    class Step:
        clock = Clock()  # on the class: what an instance holds is the step's state

        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            type(self).clock.began.append(time.perf_counter())
            try:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                return loss.detach()
            finally:
                type(self).clock.ended.append(time.perf_counter())

    step = Step()
    return step, Step.clock


def one_round(capacity: int) -> Round:
    """Meet one out-of-memory error, and go on for five calls."""
    step, clock = make_step()
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    with oom_guard() as guard:
        guard.run(step, x[:8], y[:8])  # the optimizer's state is made, and the step is known
        clock.began.clear()
        clock.ended.clear()
        later, held = [], []
        with simulate_oom(capacity) as device:
            held.append(device.live_bytes)
            started = time.perf_counter()
            guard.run(step, x, y)
            finished = time.perf_counter()
            held.append(device.live_bytes)
            for _ in range(5):
                before = time.perf_counter()
                guard.run(step, x, y)
                later.append(time.perf_counter() - before)
                held.append(device.live_bytes)
        if guard.report.ooms != 1:
            raise SystemExit(f"expected one out-of-memory error, met {guard.report.ooms}")
    return Round(clock.ended[0] - started, clock.began[1] - clock.ended[0], finished - clock.began[1], later, held)


def in_pieces_from_the_start(capacity: int, limit: int) -> float:
    """Return the median of calls that never ran out: their guard knew the limit."""
    step, _ = make_step()
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    seconds = []
    with simulate_oom(capacity), oom_guard() as guard:
        for _ in range(7):
            before = time.perf_counter()
            for rows in torch.arange(BATCH).split(limit):
                guard.run(step, x[rows], y[rows])
            seconds.append(time.perf_counter() - before)
    return statistics.median(seconds)


def main() -> None:
    """Print one table."""
    torch.manual_seed(0)
    logging.getLogger("oomguard").setLevel(logging.ERROR)
    step, _ = make_step()
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    with simulate_oom("8GiB") as device:
        step(x, y)
    capacity = device.peak_bytes * 3 // 4
    rounds = [one_round(capacity) for _ in range(ROUNDS)]
    pieces = in_pieces_from_the_start(capacity, BATCH // 2)

    def median(values: list[float]) -> str:
        return f"{1000 * statistics.median(values):8.1f} ms"

    second = [each.later[0] for each in rounds]
    print(f"torch {torch.__version__}, {ROUNDS} rounds of {BATCH} items, medians")
    print(f"the attempt that ran out          {median([each.failed for each in rounds])}")
    print(f"recovery: undo, collect, empty    {median([each.recovery for each in rounds])}")
    print(f"the same batch in two pieces      {median([each.retry for each in rounds])}")
    print(f"the second call, in two pieces    {median(second)}")
    print(f"the sixth call, in two pieces     {median([each.later[-1] for each in rounds])}")
    print(f"two halves that never ran out     {median([pieces])}")
    print(f"the second call beside these      {statistics.median(second) / pieces:8.2f} x")
    more, growth = (max(each.held[i] - each.held[k] for each in rounds) for i, k in ((1, 0), (-1, 1)))
    print(f"held after the call that ran out  {more:8} bytes more than before, which are the gradients")
    print(f"held five calls later             {growth:8} bytes more than that")


if __name__ == "__main__":
    main()
