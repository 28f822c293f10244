"""
What oomguard raises and warns.

```
RuntimeError
└─ OOMGuardError
   ├─ BatchLimitError   also torch.OutOfMemoryError: the smallest size does not fit
   ├─ InputError        also ValueError: declared inputs and the call disagree, or can't be split
   ├─ SplitError        also torch.OutOfMemoryError: this step can't run in pieces
   ├─ RestoreError      something changed that can't be put back
   ├─ RankError         ranks disagree, or one did not answer in time
   └─ PredictionError   no trace can be made
UserWarning
└─ OOMGuardWarning
```

Every message starts with ``oomguard:`` and says what was seen, what was
expected and what to do. An option with an illegal value is a plain
`ValueError` or `TypeError`, raised where the option was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomguard.report import FitReport, GuardReport


class OOMGuardError(RuntimeError):
    """The base of all errors that oomguard raises."""


class BatchLimitError(OOMGuardError, torch.OutOfMemoryError):
    """
    Even the smallest batch or piece does not fit.

    It is also a `torch.OutOfMemoryError`, so that code which already catches
    that goes on working.

    Attributes:
        report: The trials of the probe, or the events of the guard.
    """

    def __init__(self, message: str, report: FitReport | GuardReport | None = None) -> None:
        super().__init__(message)
        self.report = report


class InputError(OOMGuardError, ValueError):
    """Declared inputs and the call disagree, or an input can't be split."""


class SplitError(OOMGuardError, torch.OutOfMemoryError):
    """Memory ran out, and this step can't run in pieces, or leaves memory behind; the message names the reason."""


class RestoreError(OOMGuardError):
    """
    Memory ran out after something had changed that can't be put back.

    Attributes:
        changed: The names of all that is not as it was before the step; everything else is.
    """

    def __init__(self, message: str, changed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.changed = tuple(changed)


class RankError(OOMGuardError):
    """The ranks of a distributed run disagree, or there are ranks where one was expected."""


class PredictionError(OOMGuardError):
    """No trace of the step can be made without the device."""


class OOMGuardWarning(UserWarning):
    """Something that a user should know and that stops nothing; filter it by this class."""
