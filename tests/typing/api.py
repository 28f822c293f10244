"""What type checkers must see of the public interface; checked, never run."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import nn

from oomguard import (
    BatchLimitError,
    FitReport,
    FittedStep,
    Guard,
    GuardReport,
    Input,
    Trial,
    current_guard,
    find_batch_size,
    fit_batch,
    is_oom,
    oom_guard,
)
from oomguard.fit import BoundFittedStep
from oomguard.testing import Simulation, simulate_oom


@fit_batch(inputs={"images": Input(3, 224, 224), "labels": Input(dtype=torch.long, high=10)})
def train_step(images: torch.Tensor, labels: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return (images.mean() + labels.float().mean()) * scale


class Trainer:
    @fit_batch(inputs={"x": Input(8)}, capacity="8 GiB", search="bisect", headroom=0.0)
    def step(self, x: torch.Tensor) -> float:
        return x.mean().item()


x = torch.zeros(2, 3, 224, 224)
y = torch.zeros(2, dtype=torch.long)

assert_type(train_step(x, y), torch.Tensor)
assert_type(train_step(x, labels=y, scale=2.0), torch.Tensor)
assert_type(train_step.batch_size, int)
assert_type(train_step.report, FitReport | None)
assert_type(train_step.probe(headroom=0.1), FitReport)
train_step(x)  # type: ignore[call-arg]
train_step(x, y, scale="2")  # type: ignore[arg-type]
train_step.batch_size = 3  # type: ignore[misc]

trainer = Trainer()
assert_type(trainer.step(x), float)
assert_type(trainer.step.batch_size, int)
bound: BoundFittedStep[..., float] = trainer.step
unbound: BoundFittedStep[..., float] = Trainer.step
decorated: FittedStep[..., torch.Tensor] = train_step
trainer.step("x")  # type: ignore[arg-type]

with oom_guard(reduction=lambda x: x.numel(), on_event=print, grow_after=10) as guard:
    assert_type(guard, Guard)
    assert_type(guard.run(train_step, x, y), torch.Tensor)
    assert_type(guard.run(trainer.step, x), float)
    assert_type(guard.run(len, [1, 2]), int)
    guard.run(train_step, x)  # type: ignore[call-arg]
assert_type(guard.limit, int | None)
assert_type(guard.report, GuardReport)
assert_type(guard.state_dict(), dict[str, Any])
oom_guard(update="halves")  # type: ignore[arg-type]
oom_guard(True)  # type: ignore[call-arg]
fit_batch({"x": Input(1)})  # type: ignore[call-arg]

assert_type(current_guard(), Guard | None)
assert_type(find_batch_size(nn.Linear(2, 1), "cpu", (2,), (1,), 100), int)
assert_type(is_oom(RuntimeError()), bool)

try:
    train_step.probe()
except BatchLimitError as error:
    assert_type(error.report, FitReport | GuardReport | None)

report = train_step.probe()
assert_type(report.trials, tuple[Trial, ...])
assert_type(report.batch_size, int | None)

with simulate_oom("64MiB", fail_at=3) as device:
    assert_type(device, Simulation)
    assert_type(device.peak_bytes, int)
