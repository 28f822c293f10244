"""
Find the largest batch that fits the GPU, and keep training when memory still runs out.

`fit_batch` decorates a train step: a short probe on dummy data finds its batch
size. `oom_guard` guards its calls: an out-of-memory error is met by running the
same batch in smaller pieces, with the update that the whole batch gives.
"""

from oomguard.errors import BatchLimitError, OOMGuardError
from oomguard.fit import FittedStep, find_batch_size, fit_batch
from oomguard.guard import Guard, current_guard, oom_guard
from oomguard.memory.oom import is_oom
from oomguard.predict import predict
from oomguard.report import FitReport, GuardReport, Prediction, Trial
from oomguard.step.inputs import Input

__version__ = "0.1.0"

__all__ = [
    "BatchLimitError",
    "FitReport",
    "FittedStep",
    "Guard",
    "GuardReport",
    "Input",
    "OOMGuardError",
    "Prediction",
    "Trial",
    "current_guard",
    "find_batch_size",
    "fit_batch",
    "is_oom",
    "oom_guard",
    "predict",
]
