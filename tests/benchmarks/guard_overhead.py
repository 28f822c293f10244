"""
What a guarded call costs that meets no out-of-memory error: `python tests/benchmarks/guard_overhead.py`.

Plain and guarded calls of the same step go in pairs of random order in one run, so
that both see the same machine; the medians are compared. Nothing is asserted: a benchmark is
not a test.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from oomguard import Input, fit_batch, oom_guard


def small_step(norms: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step of a few small layers with Adam."""
    layers: list[nn.Module] = []
    for _ in range(max(norms, 4)):
        layers += [nn.Linear(16, 16), *([nn.BatchNorm1d(16)] if norms else []), nn.ReLU()]
    return training_step(nn.Sequential(*layers, nn.Linear(16, 1)))


def long_step() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step of several milliseconds, whose tensors are small enough for the allocator to keep."""
    layers: list[nn.Module] = [nn.Linear(16, 256)]
    for _ in range(14):
        layers += [nn.ReLU(), nn.Linear(256, 256)]
    return training_step(nn.Sequential(*layers, nn.Linear(256, 1)))


def training_step(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a whole update of *model*, decorated."""
    optimizer = torch.optim.Adam(model.parameters())

    @fit_batch(inputs={"x": Input(16)})
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compare(step: Callable[[torch.Tensor], torch.Tensor], items: int, rounds: int) -> tuple[float, float, float]:
    """Return the median microseconds of a plain call, of a guarded one, and of their difference in pairs."""
    x = torch.randn(items, 16)
    plain: list[float] = []
    guarded: list[float] = []
    order = random.Random(0)
    with oom_guard() as guard:
        for call in (step.__wrapped__, lambda x: guard.run(step, x)):  # type: ignore[attr-defined]
            for _ in range(20):
                call(x)
        for _ in range(rounds):
            pair = [(step.__wrapped__, plain), (step, guarded)]  # type: ignore[attr-defined]
            order.shuffle(pair)
            for call, times in pair:
                started = time.perf_counter()
                call(x)
                times.append(time.perf_counter() - started)
    pairs = [b - a for a, b in zip(plain, guarded, strict=True)]
    return tuple(1e6 * statistics.median(times) for times in (plain, guarded, pairs))  # type: ignore[return-value]


def main() -> None:
    """Print one line for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {rounds} pairs; medians in microseconds")
    print(f"{'step':34}{'plain':>10}{'guarded':>10}{'cost':>8}{'ratio':>8}{'allowed':>16}")
    for name, step, items, share, allowed in (
        ("small, no batch norm", small_step(0), 8, 1, "25 us"),
        ("small, eight batch norms", small_step(8), 8, 1, "60 us"),
        ("about 8 ms", long_step(), 100, 5, "1.01 x"),
    ):
        plain, guarded, cost = compare(step, items, rounds // share)
        print(f"{name:34}{plain:10.1f}{guarded:10.1f}{cost:8.1f}{1 + cost / plain:8.3f}{allowed:>16}")


if __name__ == "__main__":
    main()
