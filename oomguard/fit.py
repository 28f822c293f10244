"""
The decorator: find the largest batch of a step that fits, once, when it is asked for.

The decorated step keeps its signature and is called as before. Inside
`with oom_guard():` its calls are guarded.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

import torch
import wrapt
from torch import nn
from torch.nn import functional

from oomguard.memory.oom import Verdict, classify
from oomguard.memory.units import parse_bytes
from oomguard.predict import predict_step
from oomguard.probe import Plan, probe
from oomguard.report import FitReport, Prediction
from oomguard.step.call import Limit, Step, ambient
from oomguard.step.inputs import Input, check_declared
from oomguard.step.state import Saved, find_state

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
P2 = ParamSpec("P2")
R2 = TypeVar("R2")


@dataclass
class _Memory:
    """What was found for a function, or for one instance of a method's class."""

    report: FitReport | None = None
    limit: Limit | None = None
    step: Step | None = None  # of a plain function, which is always the same


class _Fitted(Generic[P, R]):
    """What a decorated function and a decorated method have in common."""

    if TYPE_CHECKING:
        __wrapped__: Callable[P, R]

    def _self_source(self) -> tuple[Plan, _Memory]:
        raise NotImplementedError

    def __oomguard_step__(self) -> Step:
        """Return the step for a guard."""
        plan, memory = self._self_source()
        return _step_of(self.__wrapped__, plan, memory)

    @property
    def batch_size(self) -> int:
        """The largest batch that fits; the first read probes, later ones remember."""
        report = self.report or self.probe()
        assert report.batch_size is not None  # noqa: S101 - a probe without an answer raises
        return report.batch_size

    @property
    def report(self) -> FitReport | None:
        """The last probe's report; None before the first."""
        return self._self_source()[1].report

    def probe(self, **overrides: Any) -> FitReport:
        """
        Find the largest batch that fits now, and remember it.

        Args:
            **overrides: Options of `fit_batch` that take other values this time.

        Returns:
            The report, with the trials.

        Raises:
            BatchLimitError: Not even the smallest size fits; its `report` has the trials.
            TypeError: An override is no option of `fit_batch`.
        """
        plan, memory = self._self_source()
        options = [option.name for option in dataclasses.fields(Plan)]
        unknown = sorted(overrides.keys() - set(options))
        if unknown:
            raise TypeError(f"oomguard: probe() got {unknown[0]!r}; its options are {', '.join(options)}")
        plan = dataclasses.replace(plan, **overrides)
        if "inputs" in overrides:
            check_declared(plan.inputs, self.__wrapped__)
        step = _step_of(self.__wrapped__, plan, memory)
        memory.report = probe(step, plan)
        memory.limit = step.limit
        return memory.report

    def predict(self, batch_size: int | None = None, capacity: int | str | None = None) -> Prediction:
        """
        Predict what the step needs on a device that is not there; see `predict`.

        Args:
            batch_size: Items whose peaks are asked for. Default: the largest that would fit.
            capacity: Bytes that the device has. Default: those given to `fit_batch`.

        Returns:
            The prediction; its `largest` has not run.

        Raises:
            PredictionError: The small steps do not run here, or no two of them agree.
            ValueError: There is no capacity, or a number is out of range.
        """
        plan, memory = self._self_source()
        wanted = plan.capacity if capacity is None else capacity
        if wanted is None:
            raise ValueError("oomguard: predict needs the capacity of the device, like capacity='24GiB'")
        step = _step_of(self.__wrapped__, plan, memory)
        return predict_step(step, dataclasses.replace(plan, capacity=None), parse_bytes(wanted), batch_size)


class BoundFittedStep(_Fitted[P, R], wrapt.BoundFunctionWrapper[P, R]):
    """A decorated method of one instance."""

    def _self_source(self) -> tuple[Plan, _Memory]:
        parent: FittedStep[..., Any] = self._self_parent
        return parent._self_plan, parent._self_memory_of(self._self_instance)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the method of its instance."""
        return getattr, (self._self_instance, self.__wrapped__.__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as a method does: that of a copied instance."""
        return getattr(copy.deepcopy(self._self_instance, memo), self.__wrapped__.__name__)


class FittedStep(_Fitted[P, R], wrapt.FunctionWrapper[P, R]):
    """
    A step that knows its batch size; made by `fit_batch`.

    It is called as the function was, and pickles as the function does: by its name.

    Attributes:
        batch_size: The largest batch that fits; the first read probes.
        report: The last probe's report; None before the first.
    """

    __bound_function_wrapper__ = BoundFittedStep  # type: ignore[assignment]

    def __init__(self, function: Callable[P, R], plan: Plan) -> None:
        super().__init__(function, self._self_call)
        self._self_plan = plan
        self._self_own = _Memory()
        self._self_instances: dict[int, tuple[object, _Memory]] = {}

    def _self_call(self, wrapped: Callable[P, R], instance: object, args: Any, kwargs: Any) -> R:
        guard = ambient.get()
        if guard is None:
            return wrapped(*args, **kwargs)
        memory = self._self_own if instance is None else self._self_memory_of(instance)
        step = memory.step
        if step is None or step.limit is not memory.limit:
            step = _step_of(wrapped, self._self_plan, memory)
            if instance is None:
                memory.step = step
        return guard.run_step(step, args, kwargs)  # type: ignore[no-any-return]

    def _self_source(self) -> tuple[Plan, _Memory]:
        return self._self_plan, self._self_own

    def _self_memory_of(self, instance: object) -> _Memory:
        """Return what is remembered for *instance* (None: a plain function) as long as it lives."""
        if instance is None:
            return self._self_own
        key = id(instance)
        if key not in self._self_instances:
            # By id, since an instance need not be hashable; a weak reference, since it must not be kept alive.
            table = self._self_instances
            table[key] = (weakref.ref(instance, lambda _: table.pop(key, None)), _Memory())
        return self._self_instances[key][1]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the function does: by its name in its module."""
        return self.__wrapped__.__qualname__

    def __deepcopy__(self, memo: dict[int, Any]) -> FittedStep[P, R]:
        """Copy as a function does: not at all."""
        return self

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type[Any] | None = None, /) -> BoundFittedStep[P, R]: ...
        @overload
        def __get__(
            self: FittedStep[Concatenate[S, P2], R2], instance: S, owner: type[Any] | None = None, /
        ) -> BoundFittedStep[P2, R2]: ...
        def __get__(self, instance: Any, owner: type[Any] | None = None, /) -> Any: ...


def _step_of(function: Callable[..., Any], plan: Plan, memory: _Memory) -> Step:
    return Step(function, function.__qualname__, plan.inputs, plan.state, memory.limit)


def fit_batch(
    *,
    inputs: Mapping[str, Any],
    state: object = None,
    device: torch.device | str | None = None,
    start: int = 2,
    max_batch_size: int | None = None,
    dataset_size: int | None = None,
    headroom: float = 0.05,
    steps_per_trial: int = 3,
    search: Literal["replay", "bisect", "double"] = "replay",
    multiple_of: int = 1,
    progress: bool | None = None,
    capacity: int | str | None = None,
) -> Callable[[Callable[P, R]], FittedStep[P, R]]:
    """
    Let a train step know the largest batch that fits.

    The first read of `.batch_size` runs the step on dummy data of growing sizes and
    puts back everything that it changed. Only sizes that have run are returned.

    Args:
        inputs: For each argument that holds the batch, an `Input`, or mappings, lists
            and tuples of them, as the argument nests.
        state: What the step changes and can't be found from its code: one object, or
            a sequence or mapping of them.
        device: Where dummy data is made. Default: where the step's model is.
        start: The first size tried, in items.
        max_batch_size: The largest size tried, in items.
        dataset_size: The number of items that there are; no larger size is tried.
        headroom: The fraction of the device's memory that stays free, from 0 to
            less than 1.
        steps_per_trial: Steps at each size. An optimizer's state appears in the first
            step, and the peak often in the second, hence 3.
        search: "double" from *start* until a size does not fit; "bisect" then between
            the last that fits and the first that does not; "replay" traces a few small
            steps, predicts the largest that fits, and runs that.
        multiple_of: Only multiples of this are tried.
        progress: Show a bar (needs tqdm). Default: where a person looks on.
        capacity: Bytes that the device is taken to have, as an int or a text like
            "8 GiB". Default: what it has; on a CPU what the machine has left.

    Returns:
        The decorator.

    Raises:
        InputError: *inputs* do not fit the function.
        ValueError: An option is out of range.

    Example:
        >>> model = torch.nn.Linear(8, 1)
        >>> @fit_batch(inputs={"x": Input(8)}, max_batch_size=64)
        ... def train_step(x):
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     return loss.detach()
        >>> train_step.batch_size
        64

    Note:
        A loader's batches may be larger than the declared inputs (longer sequences);
        declare the largest that can come.
    """
    plan = Plan(
        inputs=inputs,
        state=state,
        device=device,
        start=start,
        max_batch_size=max_batch_size,
        dataset_size=dataset_size,
        headroom=headroom,
        steps_per_trial=steps_per_trial,
        search=search,
        multiple_of=multiple_of,
        progress=progress,
        capacity=capacity,
    )

    def decorate(function: Callable[P, R]) -> FittedStep[P, R]:
        check_declared(inputs, function)
        return FittedStep(function, plan)

    return decorate


def find_batch_size(
    model: nn.Module,
    device: torch.device | str,
    input_shape: Sequence[int],
    output_shape: Sequence[int],
    dataset_size: int,
    max_batch_size: int | None = None,
    num_iterations: int = 5,
) -> int:
    """
    Return the largest power of two that *model* trains with, or the limit below it.

    Doubling from 2, each size runs *num_iterations* steps of Adam on the mean squared
    error against random targets. The answer is the last size that ran.

    Args:
        model: The model; it comes back as it was, on the device where it was.
        device: Where to train.
        input_shape: The shape of one input, without the batch dimension.
        output_shape: The shape of one output.
        dataset_size: The number of items that there are; no larger size is tried.
        max_batch_size: The largest size tried, in items.
        num_iterations: Steps at each size.

    Returns:
        A batch size that has run.

    Raises:
        BatchLimitError: Not even a batch of 1 fits.
        ValueError: A number is out of range.

    Example:
        >>> find_batch_size(torch.nn.Linear(8, 2), torch.device("cpu"), (8,), (2,), dataset_size=100)
        100

    Source:
        The article "A batch too large: finding the batch size that fits on GPUs".
    """
    plan = Plan(
        inputs={"inputs": Input(*input_shape), "targets": Input(*output_shape)},
        device=device,
        start=min(2, dataset_size, max_batch_size or 2),
        max_batch_size=max_batch_size,
        dataset_size=dataset_size,
        headroom=0.0,
        steps_per_trial=num_iterations,
        search="double",
    )
    # Moving a model replaces its tensors, so these are kept by reference and not only by value.
    saved = Saved(find_state(model.forward))
    lost = False
    home = [(parameter, parameter.data, parameter.grad) for parameter in model.parameters()]
    try:
        model.to(device).train()
        optimizer = torch.optim.Adam(model.parameters())

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            loss = functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        report = probe(Step(step, "find_batch_size", plan.inputs), plan)
    except RuntimeError as error:
        lost = classify(error) is Verdict.FATAL
        raise
    finally:
        for parameter, data, gradient in home:
            parameter.data, parameter.grad = data, None
            parameter.grad = gradient
        if not lost:  # else a copy would raise in place of the error
            saved.restore()
    assert report.batch_size is not None  # noqa: S101 - a probe without an answer raises
    return report.batch_size
