"""The answer without the device: a few small steps, replayed for a device of another size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oomguard.errors import PredictionError
from oomguard.memory.replay import Replay
from oomguard.memory.trace import Allocator
from oomguard.memory.units import parse_bytes
from oomguard.probe import Plan, StepTrials, trials_of
from oomguard.report import Prediction
from oomguard.search import model_of
from oomguard.step.call import HasStep, Step
from oomguard.step.inputs import check_declared

_CONTEXT_BYTES = 450 * 2**20  # that CUDA takes beside PyTorch's allocator, as current builds do
_CURVE_POINTS = 12
_GUESS = 64  # where the search for the largest begins


def predict(
    step: Any,
    *,
    inputs: Mapping[str, Any],
    capacity: int | str,
    batch_size: int | None = None,
    state: object = None,
    device: torch.device | str | None = None,
    start: int = 2,
    headroom: float = 0.05,
) -> Prediction:
    """
    Predict what *step* needs on a device that is not there.

    A few steps of *start* items and twice that run where the step's model is, and
    everything that they change is put back. Their allocations are then replayed with
    the sizes of larger batches, through the rules of PyTorch's caching allocator.

    Args:
        step: The train step, decorated or not.
        inputs: For each argument that holds the batch, an `Input`, as in `fit_batch`.
        capacity: Bytes that the device has, as an int or a text like "24 GiB".
        batch_size: Items whose peaks are asked for. Default: the largest that would fit.
        state: What the step changes and can't be found from its code.
        device: Where dummy data is made. Default: where the step's model is.
        start: The smaller of the sizes that run, in items.
        headroom: The fraction of the device's memory that stays free, from 0 to
            less than 1.

    Returns:
        The prediction; its `largest` has not run.

    Raises:
        PredictionError: The small steps do not run here, or no two of them agree.
        InputError: *inputs* do not fit the function.
        ValueError: An option is out of range.

    Example:
        >>> from oomguard import Input
        >>> model = torch.nn.Linear(1000, 1000)
        >>> def train_step(x):
        ...     model(x).square().mean().backward()
        >>> predict(train_step, inputs={"x": Input(1000)}, capacity="2 GiB", batch_size=10_000).fits
        True

    Note:
        On a CPU only what operations return is seen, and some operations have other
        forms than on a GPU: expect the peak within a few percent. Run on the fake GPU
        (`oomguard.testing.fake_gpu`), PyTorch's own CUDA build makes the trace. The
        workspaces that libraries choose are known to a real device alone.
    """
    plan = Plan(inputs=inputs, state=state, device=device, start=start, headroom=headroom)
    function = step.__oomguard_step__().function if isinstance(step, HasStep) else step
    check_declared(inputs, function)
    name = getattr(function, "__qualname__", repr(function))
    return predict_step(Step(function, name, inputs, state), plan, parse_bytes(capacity), batch_size)


def predict_step(step: Step, plan: Plan, capacity_bytes: int, batch_size: int | None) -> Prediction:
    """Predict for a *step* and the options of its probe; `predict` says more."""
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"oomguard: batch_size must be a whole number of at least 1, got {batch_size!r}")
    with trials_of(step, plan) as trials:
        model = _model(step, plan, trials)
        held = _context_bytes(trials.device)
    limit = capacity_bytes - held
    budget = int(limit - plan.headroom * capacity_bytes)
    unit = plan.multiple_of
    largest = model.largest(limit, budget, max(1, _GUESS // unit) * unit, unit)
    size = largest if batch_size is None else batch_size
    outcome = model.run(size or unit, limit)
    peaks = outcome if outcome.fits else model.run(size or unit)  # what does not fit has peaks, too
    sizes = sorted({max(1, round(max(size, largest) * i / _CURVE_POINTS)) for i in range(_CURVE_POINTS + 2)})
    return Prediction(
        step=step.name,
        traced_on=str(trials.device),
        traced_sizes=tuple(sorted(trace.batch_size for trace in trials.traces.values())),
        capacity_bytes=capacity_bytes,
        budget_bytes=budget,
        headroom=plan.headroom,
        largest=largest,
        batch_size=size,
        fits=size > 0 and outcome.fits and outcome.reserved_bytes <= budget,
        peak_allocated_bytes=peaks.allocated_bytes,
        peak_reserved_bytes=peaks.reserved_bytes,
        guessed=model.guessed,
        curve=tuple((each, model.run(each).reserved_bytes) for each in sizes),
    )


def _model(step: Step, plan: Plan, trials: StepTrials) -> Replay:
    try:
        model = model_of(trials, max(1, plan.start // plan.multiple_of))
    except RuntimeError as error:
        raise PredictionError(
            f"oomguard: {step.name} does not run on {trials.device} with {plan.start} items, so its allocations can't "
            f"be seen: {error}. Predict where its small steps run, or on the fake GPU (oomguard.testing.fake_gpu)."
        ) from error
    if model is None:
        raise PredictionError(
            f"oomguard: no two small steps of {step.name} allocate in the same order on {trials.device} (tried "
            f"{', '.join(map(str, sorted(trials.traces))) or plan.start}), so larger ones can't be told from them. "
            "Give another start, or find the batch size on the device with fit_batch."
        )
    return model if model.trace.allocator is not None else model.on(Allocator())


def _context_bytes(device: torch.device) -> int:
    """Return what the device holds beside PyTorch's allocator, or what it usually is."""
    if device.type != "cuda":
        return _CONTEXT_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
