"""A user's step as the library sees it, and the guard that its calls meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Limit:
    """
    The largest batch that is used for inputs of at least certain shapes.

    Attributes:
        size: Items in one piece.
        shapes: The shape of one item of each input. Inputs at least as large in
            every dimension need at least as much memory; smaller ones say nothing.
    """

    size: int
    shapes: Shapes

    def holds_for(self, shapes: Shapes) -> bool:
        """Tell whether inputs of these *shapes* need at least as much memory."""
        return len(shapes) == len(self.shapes) and all(
            len(now) == len(then) and all(a >= b for a, b in zip(now, then, strict=True))
            for now, then in zip(shapes, self.shapes, strict=True)
        )


@dataclass(eq=False)
class Step:
    """
    A function that takes one batch.

    Attributes:
        function: The user's function, bound if it is a method.
        name: Its qualified name.
        inputs: The declared inputs, or None: every tensor argument is batch.
        state: What it changes and can't be found from its code.
        limit: What a probe has found.
        identity: What a guard knows the step by, from its first call on.
    """

    function: Callable[..., Any]
    name: str
    inputs: Mapping[str, Any] | None = None
    state: object = None
    limit: Limit | None = None
    identity: tuple[object, ...] | None = None


class Runner(Protocol):
    """What a decorated call asks of the ambient guard."""

    def run_step(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run *step*, guarded."""


@runtime_checkable
class HasStep(Protocol):
    """A decorated function knows the step that it stands for."""

    def __oomguard_step__(self) -> Step:
        """Return the step."""


ambient: ContextVar[Runner | None] = ContextVar("oomguard_ambient", default=None)
