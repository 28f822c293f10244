"""
Optimizers, models and styles of step, and the verdict on a training in which one allocation has failed.

Everything is in float64 and tiny: an update that differs shows, and an OOM at every
single allocation is affordable.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from training import assert_same

from oomguard import oom_guard
from oomguard.errors import OOMGuardError, RestoreError
from oomguard.testing import simulate_oom

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from oomguard import Guard
    from oomguard.report import GuardEvent

ITEMS, FEATURES, CLASSES, LENGTH, CALLS = 8, 4, 3, 2, 3
ACCUMULATED = 3  # calls to one update, where the user accumulates


# Optimizers and models

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2, history_size=2),
}


class _Language(nn.Module):
    """One block of a transformer, with dropout, whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 4)
        self.attention = nn.Linear(4, 12, bias=False)
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        query, key, value = self.attention(h).chunk(3, -1)
        h = self.norm(h + self.dropout(functional.scaled_dot_product_attention(query, key, value, is_causal=True)))
        return functional.linear(h, self.embedding.weight)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 3, batch_first=True)
        self.last = nn.Linear(3, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)),
    "CNN": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, CLASSES)
    ),
    "transformer": _Language,
    "LSTM": _Recurrent,
}
_UNMOVED = {"CNN": "model.0.bias"}  # batch norm takes away what it adds: it is written and stays as it was
_DIFFERS_IN_PIECES = {"CNN", "transformer"}  # batch statistics and dropout masks: each piece has its own


def _batches(model: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"MLP": (FEATURES,), "CNN": (1, 4, 4), "LSTM": (LENGTH, FEATURES)}
    made = []
    for call in range(CALLS):
        ids = torch.arange(ITEMS) + call * ITEMS
        if model == "transformer":
            tokens = torch.randint(0, CLASSES, (ITEMS, LENGTH + 1), generator=generator)
            made.append((tokens[:, :-1], tokens[:, 1:], ids))
        else:
            x = torch.randn(ITEMS, *shapes[model], generator=generator, dtype=torch.float64)
            made.append((x, torch.randint(0, CLASSES, (ITEMS,), generator=generator), ids))
    return made


# Styles


@dataclass
class Run:
    """One training: its step, what the loop does after a call, and what both change."""

    step: Callable[..., Any]
    state: dict[str, Any]  # modules, optimizers, scalers, schedulers
    uses: torch.Tensor  # a weight for every sample: its gradient counts how often the sample was used
    after: Callable[[int, Any], None] = lambda *_: None
    results: list[Any] = field(default_factory=list)
    counts: list[torch.Tensor] = field(default_factory=list)

    def end_call(self, call: int, result: Any) -> None:
        """Do what the loop does, and note the result and the uses of samples."""
        self.after(call, result)
        self.results.append(result)
        self.counts.append(self.uses.grad.clone())
        self.uses.grad = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, in the order of their updates."""
        return [thing for thing in self.state.values() if isinstance(thing, torch.optim.Optimizer)]


class _Parts(NamedTuple):
    model: nn.Module
    opt: torch.optim.Optimizer
    uses: torch.Tensor


def _parts(optimizer: str, model: str) -> _Parts:
    torch.manual_seed(1)
    made = MODELS[model]().double()
    uses = torch.zeros(ITEMS * CALLS, dtype=torch.float64, requires_grad=True)
    return _Parts(made, OPTIMIZERS[optimizer](made.parameters()), uses)


def _loss(out: torch.Tensor, y: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(out.flatten(0, -2), y.flatten()) + used.mean()


def _update(opt: torch.optim.Optimizer, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Compute a loss and update, in the way that the optimizer wants it."""

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = forward()
        loss.backward()
        return loss

    if isinstance(opt, torch.optim.LBFGS):
        return opt.step(closure)
    loss = closure()
    opt.step()
    return loss


def update_in_step(optimizer: str, name: str) -> Run:
    model, opt, uses = _parts(optimizer, name)

    def step(x, y, ids):
        return _update(opt, lambda: _loss(model(x), y, uses[ids])).detach()

    return Run(step, {"model": model, "opt": opt}, uses)


def update_in_loop(optimizer: str, name: str) -> Run:
    model, opt, uses = _parts(optimizer, name)

    def step(x, y, ids):
        loss = _loss(model(x), y, uses[ids])
        loss.backward()
        return loss.detach()

    def after(_, loss):
        opt.step(lambda: loss)
        opt.zero_grad()

    return Run(step, {"model": model, "opt": opt}, uses, after)


def scaler_clip_scheduler(optimizer: str, name: str) -> Run:
    model, opt, uses = _parts(optimizer, name)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)

    def step(x, y, ids):
        opt.zero_grad()
        loss = _loss(model(x), y, uses[ids])
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        scheduler.step()
        return loss.detach()

    return Run(step, {"model": model, "opt": opt, "scaler": scaler, "scheduler": scheduler}, uses)


def accumulation(optimizer: str, name: str) -> Run:
    model, opt, uses = _parts(optimizer, name)

    def step(x, y, ids):
        loss = _loss(model(x), y, uses[ids]) / ACCUMULATED
        loss.backward()
        return loss.detach()

    def after(call, loss):
        if call % ACCUMULATED == ACCUMULATED - 1:
            opt.step(lambda: loss)
            opt.zero_grad()

    return Run(step, {"model": model, "opt": opt}, uses, after)


def gan(optimizer: str, name: str) -> Run:
    model, opt, uses = _parts(optimizer, name)
    judge = nn.Sequential(nn.Linear(CLASSES, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    judge_opt = OPTIMIZERS[optimizer](judge.parameters())

    def step(x, y, ids):
        made = model(x).detach()
        real = functional.one_hot(y, CLASSES).double()
        _update(judge_opt, lambda: judge(made).square().mean() + (judge(real) - 1).square().mean())
        return _update(opt, lambda: (judge(model(x)) - 1).square().mean() + uses[ids].mean()).detach()

    return Run(step, {"judge": judge, "judge_opt": judge_opt, "model": model, "opt": opt}, uses)


def checkpointed(optimizer: str, name: str) -> Run:
    model, opt, uses = _parts(optimizer, name)

    def step(x, y, ids):
        return _update(opt, lambda: _loss(checkpoint(model, x, use_reentrant=False), y, uses[ids])).detach()

    return Run(step, {"model": model, "opt": opt}, uses)


STYLES: dict[str, Callable[[str, str], Run]] = {
    "update in the step": update_in_step,
    "update in the loop": update_in_loop,
    "scaler, clip, scheduler": scaler_clip_scheduler,
    "accumulation": accumulation,
    "GAN": gan,
    "checkpointing": checkpointed,
}


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix."""

    optimizer: str
    model: str
    style: str

    def __str__(self) -> str:
        return f"{self.optimizer} / {self.model} / {self.style}"

    def make(self) -> Run:
        return STYLES[self.style](self.optimizer, self.model)

    def batches(self) -> list[tuple[torch.Tensor, ...]]:
        return _batches(self.model)


CELLS = [
    Cell(optimizer, model, style)
    for optimizer, model, style in itertools.product(OPTIMIZERS, MODELS, STYLES)
    if (optimizer, style) != ("LBFGS", "scaler, clip, scheduler")  # GradScaler.step takes no closure
]


@dataclass(frozen=True)
class Mode:
    """Which call meets the OOM, whether the guard keeps a copy, and whether it runs in pieces by then."""

    call: int
    snapshot: bool = False
    in_pieces: bool = False

    def __str__(self) -> str:
        words = [f"call {self.call}", "snapshot" * self.snapshot, "in pieces" * self.in_pieces]
        return ", ".join(word for word in words if word)


MODES = [Mode(0), Mode(1), Mode(0, snapshot=True), Mode(1, snapshot=True), Mode(1, in_pieces=True)]


def can_be_split(cell: Cell) -> bool:
    """Tell whether pieces can give one update; else the step is refused and left as it was."""
    return cell.style != "GAN" and not (cell.optimizer == "LBFGS" and updates_inside(cell))


def updates_inside(cell: Cell) -> bool:
    return cell.style not in ("update in the loop", "accumulation")


def modes(cell: Cell) -> list[Mode]:
    return [mode for mode in MODES if can_be_split(cell) or not mode.in_pieces]


# What a training has become


def everything(run: Run) -> dict[str, Any]:
    """Return a copy of all that a call may change, by the names that an error would use."""
    found: dict[str, Any] = {"random": torch.get_rng_state(), "uses": copy.deepcopy(run.uses.grad)}
    found |= {"results": list(run.results), "counts": list(run.counts)}
    names: dict[torch.Tensor, str] = {}
    for name, thing in run.state.items():
        if isinstance(thing, nn.Module):
            for own, tensor in [*thing.named_parameters(), *thing.named_buffers()]:
                names[tensor] = f"{name}.{own}"
                found[f"{name}.{own}"] = tensor.detach().clone()
                found[f"gradient of {name}.{own}"] = None if tensor.grad is None else tensor.grad.clone()
        elif isinstance(thing, torch.optim.Optimizer):
            found[f"groups of {name}"] = copy.deepcopy(thing.state_dict()["param_groups"])
            for parameter, state in thing.state.items():
                for key, value in state.items():
                    found[f"{key} of {names[parameter]}"] = copy.deepcopy(value)
        else:
            found[name] = copy.deepcopy(thing.state_dict())
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Name what is not bit for bit the same."""
    changed = set(before) ^ set(after)
    for name in set(before) & set(after):
        try:
            assert_same(after[name], before[name], rtol=0, atol=0)
        except AssertionError:
            changed.add(name)
    return changed


def saved(run: Run) -> dict[str, Any]:
    """Return a checkpoint, as people write them."""
    kept = {name: copy.deepcopy(thing.state_dict()) for name, thing in run.state.items()}
    return {"random": torch.get_rng_state(), **kept}


def load(run: Run, kept: dict[str, Any]) -> None:
    torch.set_rng_state(kept["random"])
    for name, thing in run.state.items():
        thing.load_state_dict(copy.deepcopy(kept[name]))


# Verdicts

EXACT, AS_BEFORE, CHANGED, WRONG = VERDICTS = "exact", "refused as before", "refused changed", "wrong"


class Wrong(Exception):  # noqa: N818 - a verdict
    """The training went on with other numbers, or an error said what is not so."""


class Layout(NamedTuple):
    """The allocations of one call without a failure."""

    count: int
    updates: list[tuple[int, int]]  # the first and last allocation of each update that takes effect


class Point(NamedTuple):
    """What became of a training with a failure."""

    verdict: str
    reason: str = ""
    left: int = 0  # allocations between the recovery and the end of the call


def _start(cell: Cell, guard: Guard, mode: Mode) -> Run:
    """Make a training whose guard knows a limit where the mode says so."""
    torch.manual_seed(5)
    run = cell.make()
    if mode.in_pieces:
        _set_limit(cell, guard, run, ITEMS // 2)
    return run


def _set_limit(cell: Cell, guard: Guard, run: Run, limit: int) -> None:
    shapes = [list(tensor.shape[1:]) for tensor in cell.batches()[0]]
    guard.load_state_dict({"limits": {run.step.__qualname__: [{"size": limit, "shapes": shapes}]}})


@functools.cache
def layout(cell: Cell, mode: Mode) -> Layout:
    """Count what a call allocates, and find its updates."""
    guard = oom_guard()
    run = _start(cell, guard, mode)
    device = simulate_oom("1GiB")
    starts, updates = list[int](), list[tuple[int, int]]()
    for i, batch in enumerate(cell.batches()[: mode.call + 1]):
        if i < mode.call:
            with guard:
                run.end_call(i, guard.run(run.step, *batch))
            continue
        for optimizer in run.optimizers:
            optimizer.register_step_pre_hook(lambda *_: starts.append(device.allocations + 1))
            optimizer.register_step_post_hook(lambda *_: updates.append((starts.pop(), device.allocations)))
        with device, guard:
            guard.run(run.step, *batch)
    return Layout(device.allocations, updates[-len(run.optimizers) :])


@functools.cache
def reference(cell: Cell, limits: tuple[int | None, ...]) -> dict[str, Any]:
    """Train without a failure: whole, or where pieces differ by nature in the same pieces."""
    torch.manual_seed(5)
    run, guard = cell.make(), oom_guard()
    for i, (batch, limit) in enumerate(zip(cell.batches(), limits, strict=True)):
        if limit is not None and cell.model in _DIFFERS_IN_PIECES:
            _set_limit(cell, guard, run, limit)
            with guard:
                result = guard.run(run.step, *batch)
        else:
            result = run.step(*batch)
        run.end_call(i, result)
    return everything(run)


def judge(cell: Cell, mode: Mode, allocation: int, second: int | None = None) -> Point:
    """
    Train with an OOM at one *allocation* of a call, and say what came of it.

    With *second*, memory runs out once more, that many allocations after the guard has recovered.
    """
    try:
        return _train(cell, mode, allocation, second)
    except Exception as error:  # noqa: BLE001 - an error that no one promised is a verdict, too
        where = f"{cell}, {mode}, allocation {allocation}" + (f" and {second} later" if second else "")
        return Point(WRONG, f"{where}: {type(error).__name__}: {error}")


def _train(cell: Cell, mode: Mode, allocation: int, second: int | None) -> Point:
    device, verdict, limits = simulate_oom(fail_at=allocation), EXACT, []

    def recovered(event: GuardEvent) -> None:
        if device.allocations != device.fail_at:
            raise Wrong("recovery itself has allocated on the device")
        device.fail_at = allocation + second if second and len(guard.report.events) == 1 else None

    guard = oom_guard(snapshot=mode.snapshot, on_event=recovered)
    run = _start(cell, guard, mode)
    for i, batch in enumerate(cell.batches()):
        if i != mode.call:
            with guard:
                result = guard.run(run.step, *batch)
        else:
            before, kept = everything(run), saved(run)
            try:
                with device, guard:
                    result = guard.run(run.step, *batch)
            except OOMGuardError as error:
                verdict = CHANGED if isinstance(error, RestoreError) else AS_BEFORE
                changed = differences(before, everything(run))
                if isinstance(error, RestoreError):
                    _check_changes(cell, mode, device.fail_at, error, changed, is_first=second is None)
                    load(run, kept)
                elif changed:
                    raise Wrong(f"{type(error).__name__}, and {sorted(changed)} are not as before") from error
                with guard:
                    result = guard.run(run.step, *batch)
            if device.allocations < allocation:
                raise Wrong(f"only {device.allocations} allocations")
        limits.append(guard.limit)
        run.end_call(i, result)
    bitwise = guard.limit is None or cell.model in _DIFFERS_IN_PIECES
    expected = reference(cell, tuple(limits))
    assert_same(everything(run), expected, rtol=0 if bitwise else 1e-9, atol=0 if bitwise else 1e-12)
    return Point(verdict, left=device.allocations - allocation)


def _check_changes(
    cell: Cell, mode: Mode, allocation: int, error: RestoreError, changed: set[str], *, is_first: bool
) -> None:
    """Check that an error which leaves something changed is allowed here, and names just that."""
    if mode.snapshot:
        raise Wrong("a RestoreError although there is a snapshot")
    if mode.call == 0:
        raise Wrong("a RestoreError in the step that creates the optimizer's state")
    if not changed:
        raise Wrong("a RestoreError, and nothing has changed")
    named = set(error.changed)
    if changed != named and changed != named - {_UNMOVED.get(cell.model)}:
        raise Wrong(f"not named: {sorted(changed - named)}, named: {sorted(named - changed)}")
    if "last checkpoint" not in str(error):
        raise Wrong("a RestoreError that does not say how to go on")
    first, last = layout(cell, mode).updates[-1]
    if is_first and not first <= allocation <= last:
        raise Wrong("a RestoreError outside the last update of the call")


def points(cell: Cell, mode: Mode, stride: int = 1) -> list[Point]:
    """Judge every *stride*-th allocation of a call, and all of those in its updates."""
    count, updates = layout(cell, mode)
    chosen = {*range(1, count + 1, stride), *itertools.chain(*(range(a, b + 1) for a, b in updates))}
    return [judge(cell, mode, allocation) for allocation in sorted(chosen)]


def pairs(cell: Cell, mode: Mode, stride: int) -> list[Point]:
    """Judge two OOMs in one call: every *stride*-th allocation of the first attempt and of the second."""
    found = []
    for allocation in range(1, layout(cell, mode).count + 1, stride):
        found.append(judge(cell, mode, allocation))
        found += [judge(cell, mode, allocation, second) for second in range(1, found[-1].left + 1, stride)]
    return found


def table(found: Mapping[Cell, list[Point]]) -> str:
    """Return the matrix as it is printed: optimizers and models by styles, with the number of each verdict."""
    counts = {cell: Counter(point.verdict for point in judged) for cell, judged in found.items()}
    totals = sum(counts.values(), Counter[str]())
    heads = [f"{optimizer}, {model}" for optimizer, model in itertools.product(OPTIMIZERS, MODELS)]
    lines = [" / ".join(VERDICTS), f"{'':28}" + "".join(f"{style:>25}" for style in STYLES)]
    for head, (optimizer, model) in zip(heads, itertools.product(OPTIMIZERS, MODELS), strict=True):
        row = [counts.get(Cell(optimizer, model, style)) for style in STYLES]
        texts = ["-" if count is None else " / ".join(str(count[v]) for v in VERDICTS) for count in row]
        lines.append(f"{head:28}" + "".join(f"{text:>25}" for text in texts))
    lines.append(
        f"{totals.total()} allocation points: {totals[EXACT]} exact, {totals[AS_BEFORE]} refused as before, "
        f"{totals[CHANGED]} refused changed, {totals[WRONG]} wrong"
    )
    return "\n".join(lines)
