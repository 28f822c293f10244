"""The decorator: what it checks, what it remembers for whom, and how it behaves as the function that it wraps."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn

from oomguard import BatchLimitError, FittedStep, Input, find_batch_size, fit_batch, oom_guard
from oomguard.errors import InputError
from oomguard.testing import simulate_oom

INPUTS = {"x": Input(4)}


@fit_batch(inputs=INPUTS, max_batch_size=8)
def module_step(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Scale the mean."""
    return x.mean() * scale


class Trainer:
    """A class with a decorated method of each kind."""

    def __init__(self, width=4):
        self.model = nn.Linear(4, width)
        self.calls = 0

    @fit_batch(inputs=INPUTS, capacity="64KiB", headroom=0.0)
    def step(self, x):
        self.calls += 1
        return self.model(x).mean()

    @staticmethod
    @fit_batch(inputs=INPUTS, max_batch_size=8)
    def static_step(x):
        return x.mean()

    @classmethod
    @fit_batch(inputs=INPUTS, max_batch_size=8)
    def class_step(cls, x):
        return x.mean()


def test_a_decorated_function_is_called_as_before():
    assert module_step(torch.ones(2, 4), scale=3.0) == 3
    assert (module_step.__name__, module_step.__doc__) == ("module_step", "Scale the mean.")
    assert list(inspect.signature(module_step).parameters) == ["x", "scale"]
    assert isinstance(module_step, FittedStep)


def test_the_batch_size_is_probed_once_and_remembered():
    calls = []

    def count(batch_size, device):
        calls.append(batch_size)
        return torch.ones(batch_size, device=device)

    @fit_batch(inputs={"x": Input(make=count)}, max_batch_size=4, steps_per_trial=1, search="double")
    def step(x):
        return x.mean()

    assert step.report is None
    assert [step.batch_size, step.batch_size] == [4, 4]
    assert calls == [2, 4]
    assert step.report.batch_size == 4

    assert step.probe(max_batch_size=3).batch_size == 3
    assert step.batch_size == 3


def test_methods_remember_for_each_instance_and_keep_none_alive():
    small, large = Trainer(4), Trainer(64)

    assert small.step.batch_size > large.step.batch_size
    assert small.step.report.restored == ("self.model (Linear, 2 tensors)", "random state")
    assert small.calls == 0
    assert Trainer().step.report is None

    gone = weakref.ref(large)
    del large
    gc.collect()
    assert gone() is None
    assert len(Trainer.step._self_instances) == 1


@pytest.mark.parametrize(
    "step",
    [Trainer.static_step, Trainer().static_step, Trainer.class_step, Trainer().class_step],
    ids=["static", "static of an instance", "class", "class of an instance"],
)
def test_static_and_class_methods_are_steps_too(step):
    assert step.batch_size == 8
    assert step(torch.ones(2, 4)) == 1


def test_a_method_is_guarded_like_a_function():
    trainer = Trainer()
    x = torch.ones(8, 4)

    with oom_guard(update="each") as guard, simulate_oom(fail_at=2):
        trainer.step(x)

    assert guard.limit == 4
    assert trainer.calls == 2


@pytest.mark.parametrize("function", [module_step, Trainer().step], ids=["function", "method"])
def test_a_decorated_step_pickles_and_copies_as_the_function_does(function):
    for again in (pickle.loads(pickle.dumps(function)), copy.deepcopy(function)):
        assert again(torch.ones(2, 4)).shape == ()
        assert again.__name__ == function.__name__

    assert copy.deepcopy(module_step) is module_step
    assert pickle.loads(pickle.dumps(module_step)) is module_step


def test_a_nested_batch_is_declared_as_it_nests():
    @fit_batch(
        inputs={"batch": {"ids": Input(16, dtype=torch.long, high=50), "pair": (Input(2), [Input(3, batch_dim=1)])}},
        max_batch_size=6,
    )
    def step(batch):
        (a, (b,)) = batch["pair"]
        assert (len(batch["ids"]), len(a), b.shape[1]) == (len(a),) * 3
        return batch["ids"].float().mean() + a.mean() + b.mean()

    assert step.batch_size == 6


@pytest.mark.parametrize(
    ("inputs", "function", "message"),
    [
        ({"images": Input(3)}, lambda x: x, "has no argument 'images'; its arguments are x"),
        ({}, lambda x: x, "inputs must map the arguments"),
        ({"x": (3, 224)}, lambda x: x, r"inputs\['x.0'\] must be an Input"),
        ({"x": Input(3)}, lambda x, y: x, "needs 'y', which inputs does not declare"),
    ],
)
def test_a_wrong_declaration_is_refused_at_decoration(inputs, function, message):
    with pytest.raises(InputError, match=message):
        fit_batch(inputs=inputs)(function)


def test_a_generator_function_never_runs_and_is_refused():
    def step(x):
        yield x

    with pytest.raises(InputError, match="calling it runs nothing"):
        fit_batch(inputs=INPUTS)(step)


def test_dummy_data_that_has_its_batch_dimension_already_is_refused():
    step = fit_batch(inputs={"x": Input(make=lambda n, device: torch.ones(32, n, device=device))})(lambda x: x.mean())

    with pytest.raises(InputError, match=r"make of input 'x' was asked for 2 items and returned a batch of 32"):
        step.probe()


def test_an_override_that_is_no_option_is_refused():
    with pytest.raises(TypeError, match=r"oomguard: probe\(\) got 'head_room'; its options are inputs, state, device"):
        module_step.probe(head_room=0.1)
    with pytest.raises(InputError, match="has no argument 'y'"):
        module_step.probe(inputs={"y": Input(3)})


def test_there_is_no_bare_form():
    with pytest.raises(TypeError):
        fit_batch(lambda x: x)


# The plain function


def test_the_plain_function_doubles_and_returns_the_last_size_that_ran():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))

    def trains(size):
        optimizer = torch.optim.Adam(model.parameters())
        try:
            with simulate_oom("100KiB"):
                for _ in range(5):
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(torch.rand(size, 8)), torch.rand(size, 2)).backward()
                    optimizer.step()
        except torch.OutOfMemoryError:
            return False
        return True

    with simulate_oom("100KiB"):
        size = find_batch_size(model, "cpu", (8,), (2,), 10_000)

    assert size == 64
    assert (trains(size), trains(2 * size)) == (True, False)


@pytest.mark.parametrize(
    ("dataset_size", "max_batch_size", "expected"),
    [(100, None, 100), (1000, 6, 6), (5, None, 5), (1, None, 1), (9, 1, 1)],
)
def test_the_plain_function_stops_at_the_data_set_and_at_the_maximum(dataset_size, max_batch_size, expected):
    model = nn.Linear(4, 2)

    assert find_batch_size(model, torch.device("cpu"), (4,), (2,), dataset_size, max_batch_size) == expected
    assert find_batch_size(model, torch.device("cpu"), (4,), (2,), dataset_size, max_batch_size, 1) == expected


def test_the_plain_function_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    model[0].weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    places = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    random = torch.get_rng_state()

    find_batch_size(model, "cpu", (4,), (2,), 16)

    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert places == [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    assert [m.training for m in model.modules()] == [False] * 4
    assert model[0].weight.grad.sum() == 16
    assert model[0].bias.grad is None
    assert torch.equal(random, torch.get_rng_state())


def test_the_plain_function_brings_the_model_back_to_its_device(mocker):
    """The meta device stands for another one: what was moved there has to come back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mocker.patch("oomguard.fit.probe", side_effect=lambda step, plan: step.function(torch.ones(2, 4), torch.ones(2, 4)))
    places = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]

    with pytest.raises(RuntimeError):
        find_batch_size(model, "meta", (4,), (4,), 16)

    assert places == [t.data_ptr() for t in (*model.parameters(), *model.buffers())]


def test_the_plain_function_says_when_nothing_fits():
    model = nn.Linear(4, 2)

    with simulate_oom(20), pytest.raises(BatchLimitError, match="tried 2, 1"):
        find_batch_size(model, "cpu", (4,), (2,), 16)


@pytest.mark.parametrize("arguments", [(0,), (10, 0), (10, None, 0)])
def test_the_plain_function_refuses_numbers_out_of_range(arguments):
    with pytest.raises(ValueError, match="must be a whole number of at least 1, got 0"):
        find_batch_size(nn.Linear(4, 2), "cpu", (4,), (2,), *arguments)
