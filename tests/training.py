"""Train steps as people write them, small and in float64, for tests that compare runs."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

if TYPE_CHECKING:
    from collections.abc import Callable

FEATURES, CLASSES, WIDTH = 6, 3, 400


class Wide(nn.Module):
    """A classifier whose activations take far more memory than its parameters, as on a real card."""

    def __init__(self, hidden: int = 8, *middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, hidden)
        self.middle = nn.Sequential(*middle)
        self.last = nn.Linear(hidden, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.middle(torch.tanh(self.first(x)))
        wide = torch.tanh(h.unsqueeze(2) * torch.linspace(0.5, 1.5, WIDTH, dtype=h.dtype))
        return self.last(wide.mean(2))


@dataclass
class Training:
    """A step, what it changes, and what the loop does after a call."""

    step: Callable[[torch.Tensor, torch.Tensor], Any]
    state: dict[str, Any]
    after: Callable[[int], None] = lambda _: None
    tags: set[str] = field(default_factory=set)


def batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(size, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def snapshot(training: Training) -> dict[str, Any]:
    """Everything comparable in a training's state, copied."""
    plain: dict[str, Any] = {}
    for name, thing in training.state.items():
        if isinstance(thing, nn.Module):
            plain[name] = {k: v.clone() for k, v in thing.state_dict().items()}
            plain[f"{name}.grad"] = [
                p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else copy.deepcopy(p.grad)
                for p in thing.parameters()
            ]
        elif callable(thing):
            plain[name] = thing()
        elif hasattr(thing, "state_dict"):
            plain[name] = copy.deepcopy(thing.state_dict())
            if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
                plain[name].pop("_get_lr_called_within_step", None)
        else:
            plain[name] = copy.deepcopy(thing)
    return plain


def assert_same(actual: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-12, where: str = "state") -> None:
    """Compare nested state; numbers within *rtol*, all else equal."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_same(actual[key], value, rtol=rtol, atol=atol, where=f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, rtol=rtol, atol=atol, where=f"{where}[{i}]")
    elif isinstance(expected, float):
        assert actual == expected or abs(actual - expected) <= atol + rtol * abs(expected), where
    else:
        assert actual == expected, where


def _model(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return Wide(8, *middle).double()


def plain(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Training:
    model = _model()
    opt = optimizer(model.parameters())

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def sgd_momentum() -> Training:
    return plain(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))


def adam() -> Training:
    return plain(lambda p: torch.optim.Adam(p, 0.01))


def adamw_amp_scheduler() -> Training:
    model = _model()
    opt = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=50)

    def step(x, y):
        opt.zero_grad()
        with torch.autocast("cpu", enabled=False):  # reduced precision would hide differences
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        scheduler.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt, "scaler": scaler, "scheduler": scheduler})


def scaler_skips() -> Training:
    """A sample now and then whose gradient is not a number: its update is skipped, and the scheduler skips with it."""
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=30)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(torch.where(x > 2.8, math.inf, x)), y)
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt, "scaler": scaler, "scheduler": scheduler})


def zeros_in_place() -> Training:
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def clips() -> Training:
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        for p in model.parameters():
            p.grad = None
        loss = functional.cross_entropy(model(x), y) * 50
        torch.autograd.backward(loss)
        clip_grad_norm_(model.parameters(), 1.0)
        clip_grad_value_(model.parameters(), 0.3)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.1, 0.1)
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def averaged_model() -> Training:
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)
    average = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        scheduler.step()
        average.update_parameters(model)
        return loss.detach()

    return Training(step, {"model": model, "opt": opt, "average": average, "scheduler": scheduler})


def sparse() -> Training:
    """Sparse gradients of a table, and an optimizer that takes only those."""
    torch.manual_seed(1)
    table = nn.Embedding(CLASSES, WIDTH, sparse=True).double()
    opt = torch.optim.SparseAdam(table.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        loss = (torch.tanh(table(y)) * x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": table, "opt": opt})


def muon() -> Training:
    model = _model()
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 0.01)
    others = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], 0.01)

    def step(x, y):
        matrices.zero_grad()
        others.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        matrices.step()
        others.step()
        return loss.detach()

    return Training(step, {"model": model, "matrices": matrices, "others": others})


def two_optimizers() -> Training:
    model = _model()
    first = torch.optim.SGD(model.first.parameters(), 0.1, momentum=0.9)
    last = torch.optim.RMSprop(model.last.parameters(), 0.01)

    def step(x, y):
        first.zero_grad()
        last.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        first.step()
        last.step()
        return loss.detach()

    return Training(step, {"model": model, "first": first, "last": last})


def parameter_groups() -> Training:
    model = _model()
    groups = [{"params": [p], "lr": 0.01 * (i + 1), "weight_decay": 0.1 * i} for i, p in enumerate(model.parameters())]
    opt = torch.optim.AdamW(groups)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def two_backwards() -> Training:
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        out = model(x)
        loss = functional.cross_entropy(out, y)
        loss.backward(retain_graph=True)
        clip_grad_norm_(model.parameters(), 0.1)
        out.pow(2).mean().backward(gradient=torch.tensor(0.5, dtype=out.dtype))
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def gradient_penalty() -> Training:
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        x = x.clone().requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = functional.cross_entropy(out, y) + (gradient.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def update_in_loop() -> Training:
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    def after(_):
        opt.step()
        opt.zero_grad()

    return Training(step, {"model": model, "opt": opt}, after)


def accumulation_over_calls() -> Training:
    """Gradients are there at entry in two of three calls."""
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        loss = functional.cross_entropy(model(x), y) / 3
        loss.backward()
        return loss.detach()

    def after(i):
        if i % 3 == 2:
            opt.step()
            opt.zero_grad()

    return Training(step, {"model": model, "opt": opt}, after)


def checkpointed() -> Training:
    """Both forms of activation checkpointing: the reentrant one runs a backward inside the backward."""
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        h = torch.utils.checkpoint.checkpoint(model.first, x.clone().requires_grad_(), use_reentrant=True)
        out = torch.utils.checkpoint.checkpoint(
            lambda h: model.last(torch.tanh(h.unsqueeze(2).expand(-1, -1, WIDTH) * 1.5).mean(2)),
            h,
            use_reentrant=False,
        )
        loss = functional.cross_entropy(out, y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def update_by_hand() -> Training:
    model = _model()

    def step(x, y):
        model.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
        return loss.detach()

    return Training(step, {"model": model})


def regularised() -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        opt.zero_grad()
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        loss = functional.cross_entropy(model(x), y) + 1e-2 * penalty
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def frozen_part() -> Training:
    model = _model()
    model.first.requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


EXACT: list[Callable[[], Training]] = [
    sgd_momentum,
    adam,
    adamw_amp_scheduler,
    scaler_skips,
    zeros_in_place,
    clips,
    averaged_model,
    muon,
    two_optimizers,
    parameter_groups,
    two_backwards,
    gradient_penalty,
    update_in_loop,
    accumulation_over_calls,
    checkpointed,
    update_by_hand,
    regularised,
    frozen_part,
]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adam for-loop": lambda p: torch.optim.Adam(p, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


_SCHEDULERS = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], torch.optim.lr_scheduler.LRScheduler]] = {
    "LambdaLR": lambda o: _SCHEDULERS.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: _SCHEDULERS.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: _SCHEDULERS.StepLR(o, 3),
    "MultiStepLR": lambda o: _SCHEDULERS.MultiStepLR(o, [2, 5]),
    "ConstantLR": _SCHEDULERS.ConstantLR,
    "LinearLR": _SCHEDULERS.LinearLR,
    "ExponentialLR": lambda o: _SCHEDULERS.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: _SCHEDULERS.CosineAnnealingLR(o, 7),
    "PolynomialLR": _SCHEDULERS.PolynomialLR,
    "CyclicLR": lambda o: _SCHEDULERS.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: _SCHEDULERS.OneCycleLR(o, 0.1, 50),
    "CosineAnnealingWarmRestarts": lambda o: _SCHEDULERS.CosineAnnealingWarmRestarts(o, 4),
    "ChainedScheduler": lambda o: _SCHEDULERS.ChainedScheduler(
        [_SCHEDULERS.ConstantLR(o, total_iters=4), _SCHEDULERS.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: _SCHEDULERS.SequentialLR(
        o, [_SCHEDULERS.LinearLR(o), _SCHEDULERS.ExponentialLR(o, 0.9)], [4]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def scheduled(scheduler: Callable[[Any], torch.optim.lr_scheduler.LRScheduler]) -> Training:
    base = adam()
    schedule = scheduler(base.state["opt"])

    def step(x, y):
        loss = base.step(x, y)
        schedule.step()
        return loss

    return Training(step, {**base.state, "schedule": schedule, "lr": schedule.get_last_lr})


# Steps that can't be held back


def counter() -> Training:
    base = accumulation_over_calls()
    opt, count = base.state["opt"], [0]

    def step(x, y):
        loss = base.step(x, y)
        count[0] += 1
        if count[0] % 2 == 0:
            opt.step()
            opt.zero_grad()
        return loss

    return Training(step, {**base.state, "count": count})


def attribute_counter() -> Training:
    class Trainer:
        def __init__(self) -> None:
            self.base = adam()
            self.calls = 0

        def step(self, x, y):
            self.calls += 1
            return self.base.step(x, y)

    trainer = Trainer()
    return Training(trainer.step, {**trainer.base.state, "calls": lambda: trainer.calls})


def gan() -> Training:
    model = _model()
    torch.manual_seed(2)
    judge = nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    judge_opt = torch.optim.Adam(judge.parameters())
    opt = torch.optim.Adam(model.parameters())

    def step(x, y):
        judge_opt.zero_grad()
        made = model(x)
        (judge(made.detach()).mean() - judge(functional.one_hot(y, CLASSES).double()).mean()).backward()
        judge_opt.step()
        opt.zero_grad()
        loss = -judge(made).mean()
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "judge": judge, "opt": opt, "judge_opt": judge_opt})


def sam() -> Training:
    return _sam(lambda p: p)


def sam_through_data() -> Training:
    return _sam(lambda p: p.data)


def _sam(view: Callable[[torch.Tensor], torch.Tensor]) -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        opt.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [(p, 0.05 * p.grad) for p in model.parameters() if p.grad is not None]
            for p, move in moves:
                view(p).add_(move)
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, move in moves:
                view(p).sub_(move)
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def closure() -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        def evaluate():
            opt.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return opt.step(evaluate).detach()

    return Training(step, {"model": model, "opt": opt})


def metric_scheduler() -> Training:
    base = adam()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(base.state["opt"], patience=0)

    def step(x, y):
        loss = base.step(x, y)
        scheduler.step(loss)
        return loss

    return Training(step, {**base.state, "scheduler": scheduler})


def average_by_hand() -> Training:
    base = adam()
    model = base.state["model"]
    average = copy.deepcopy(model).requires_grad_(False)

    def step(x, y):
        loss = base.step(x, y)
        torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in model.parameters()], 0.1)
        return loss

    return Training(step, {**base.state, "average": average})


def queue() -> Training:
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)
    negatives = torch.zeros(16, CLASSES, dtype=torch.float64)

    def step(x, y):
        opt.zero_grad()
        out = model(x)
        loss = functional.cross_entropy(out, y) + (out @ negatives.T).pow(2).mean()
        loss.backward()
        opt.step()
        negatives[: len(x)] = out.detach()[: len(negatives)]
        return loss.detach()

    return Training(step, {"model": model, "opt": opt, "negatives": [negatives]})


def evaluation_after_update() -> Training:
    base = adam()
    model = base.state["model"]

    def step(x, y):
        base.step(x, y)
        with torch.no_grad():
            return functional.cross_entropy(model(x), y)

    return Training(step, base.state)


def update_inside_backward() -> Training:
    model = _model()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return Training(step, {"model": model})


def gradient_hook() -> Training:
    base = adam()
    for p in base.state["model"].parameters():
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return base


def gradient_by_function() -> Training:
    model = _model()

    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.sub_(0.1 * g)
        return loss.detach()

    return Training(step, {"model": model})


def gradient_by_functional_transform() -> Training:
    model = _model()
    parameters = dict(model.named_parameters())

    def step(x, y):
        def loss_of(values):
            return functional.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

        gradients = torch.func.grad(loss_of)({k: p.detach() for k, p in parameters.items()})
        with torch.no_grad():
            for name, g in gradients.items():
                parameters[name] -= 0.1 * g

    return Training(step, {"model": model})


def gradient_of_gradient() -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward(create_graph=True)
        (0.1 * sum(p.grad.pow(2).sum() for p in model.parameters())).backward()
        opt.step()
        for p in model.parameters():
            p.grad = None
        return loss.detach()

    return Training(step, {"model": model, "opt": opt}, tags={"warns"})


def penalty_on_a_mean() -> Training:
    model = _model()
    opt = torch.optim.Adam(model.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        x = x.clone().requires_grad_()
        loss = functional.cross_entropy(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + gradient.norm(dim=1).mean()
        total.backward()
        opt.step()
        return total.detach()

    return Training(step, {"model": model, "opt": opt})


def summed_loss() -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def summed_loss_with_a_scaler() -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt, "scaler": scaler})


def ignored_targets() -> Training:
    """Every third class is padding: what the loss is divided by differs between pieces."""
    return cross_entropy_of(lambda out, y: functional.cross_entropy(out, y, ignore_index=0) * 2 + out.square().mean())


def class_weights() -> Training:
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    return cross_entropy_of(lambda out, y: functional.cross_entropy(out, y, weight=weights, label_smoothing=0.1))


def cross_entropy_of(criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        opt.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def vector_backward() -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.01)

    def step(x, y):
        opt.zero_grad()
        losses = functional.cross_entropy(model(x), y, reduction="none")
        losses.backward(torch.ones_like(losses))
        opt.step()
        return losses.detach()

    return Training(step, {"model": model, "opt": opt})


def gradients_without_a_check() -> Training:
    model = _model()

    def step(x, y):
        model.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        return loss.detach()

    return Training(step, {"model": model})


def gradients_set_by_hand() -> Training:
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad = p.detach().sign() * 0.01
        opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


def input_in_place() -> Training:
    base = adam()

    def step(x, y):
        return base.step(x.mul_(0.5), y)

    return Training(step, base.state)


def alternating() -> Training:
    """Every other call is another kind of step; its pieces would be, too."""
    model = _model()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    turns = itertools.cycle([True, False])

    def step(x, y):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if next(turns):
            opt.step()
        return loss.detach()

    return Training(step, {"model": model, "opt": opt})


REFUSED: dict[Callable[[], Training], str] = {
    counter: "every piece changes count",
    attribute_counter: "every piece changes self.calls",
    gan: "reads parameters after their update",
    sam: "moves parameters between two backwards",
    sam_through_data: "moves parameters between two backwards",
    closure: "SGD.step takes a closure",
    metric_scheduler: "ReduceLROnPlateau.step takes a metric",
    average_by_hand: "reads parameters after their update",
    queue: "writes a tensor of shape",
    evaluation_after_update: "reads parameters after their update",
    update_inside_backward: "register_post_accumulate_grad_hook",
    gradient_hook: "register_hook",
    gradient_by_function: "torch.autograd.grad",
    gradient_by_functional_transform: "torch.func",
    gradient_of_gradient: "create_graph=True",
    penalty_on_a_mean: "mean over the batch",
    summed_loss: "reduction='sum'",
    summed_loss_with_a_scaler: "reduction='sum'",
    ignored_targets: "a mean over targets that are not ignored",
    class_weights: "a mean over targets that are not ignored",
    vector_backward: "reduction='sum'",
    gradients_without_a_check: "reads gradients",
    gradients_set_by_hand: "sets gradients by hand",
}
