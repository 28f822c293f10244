"""What a walk from a step finds, and that saving and restoring it is exact."""

import collections
import functools
import random
import sched
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oomguard.step.state import Saved, find_state

MODEL = nn.Linear(2, 1)
COUNT = 0


def names(function, *extra, arguments=()):
    return find_state(function, *extra, arguments=arguments).names()


def test_globals_that_the_code_names_are_found():
    def step(x):
        return MODEL(x)

    assert names(step) == ("MODEL (Linear, 2 tensors)", "random state")


def test_attributes_that_happen_to_be_called_like_a_global_are_not():
    def step(x):
        return x.MODEL

    assert names(step) == ("random state",)


def test_closures_are_found_through_functions_and_in_order():
    model, optimizer_box = nn.Linear(2, 1), []
    optimizer_box.append(torch.optim.SGD(model.parameters(), 0.1))

    def loss_of(x):
        return model(x).mean()

    def step(x):
        optimizer_box[0].zero_grad()
        return loss_of(x)

    assert names(step) == ("model (Linear, 2 tensors)", "optimizer_box.0 (SGD)", "random state")


class Trainer:
    """What a step is bound to."""

    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.loader = DataLoader(TensorDataset(torch.ones(2, 2)))
        self.hidden = torch.zeros(3)
        self.history = []

    def step(self, x):
        return self.model(x)

    def __call__(self, x):
        return self.model(x)


TRAINER = Trainer()
FOUND = (
    "self.model (Linear, 2 tensors)",
    "self.optimizer (Adam)",
    "self.scheduler (StepLR)",
    "self.hidden (tensor of shape (3,))",
    "random state",
)


@pytest.mark.parametrize(
    "function",
    [
        Trainer().step,
        Trainer(),
        functools.partial(Trainer().step, x=1),
        functools.wraps(Trainer.step)(lambda *args, trainer=TRAINER: trainer.step(*args)),
    ],
    ids=["method", "callable object", "partial", "default"],
)
def test_what_a_step_is_bound_to_is_found(function):
    found = names(function)

    assert [name.replace("trainer.", "self.") for name in found] == list(FOUND)


def test_a_module_is_a_step_too():
    assert names(nn.Sequential(nn.Linear(2, 1)))[0] == "self (Sequential, 2 tensors)"
    assert names(nn.Linear(2, 1).forward)[0] == "self (Linear, 2 tensors)"


def test_modules_of_the_users_own_are_looked_into():
    config = types.ModuleType("my_config")
    config.model = nn.Linear(2, 1)

    def step(x):
        return config.model(x)

    config.calls = 0

    def counting_step(x):
        config.calls += 1
        return config.model(x)

    saved = Saved(find_state(counting_step))
    counting_step(torch.ones(1, 2))

    assert names(step)[0] == "config.model (Linear, 2 tensors)"
    assert saved.changes() == ["config.calls"]
    saved.restore()
    assert config.calls == 0


def test_given_state_and_arguments_are_added():
    one, two, three = nn.Linear(1, 1), nn.Linear(2, 2), nn.Linear(3, 3)

    assert names(len, one)[0] == "state (Linear, 2 tensors)"
    assert names(len, [one, two])[:2] == ("state[0] (Linear, 2 tensors)", "state[1] (Linear, 2 tensors)")
    assert names(len, {"ema": two})[0] == "ema (Linear, 2 tensors)"
    assert names(len, None, arguments=(3, three))[0] == "argument 1 (Linear, 2 tensors)"


def test_objects_of_libraries_are_left_alone_unless_they_hold_state():
    average = types.SimpleNamespace(state_dict=dict, load_state_dict=print, shadow=torch.zeros(2))
    progress = sched.scheduler()

    def step(x):
        return average, progress

    assert names(step) == ("average (SimpleNamespace)", "random state")


def test_an_object_that_has_every_attribute_is_taken_for_nothing_special():
    class Anything:
        def __getattr__(self, name):
            return None

    anything = Anything()

    def step(x):
        return anything

    Saved(find_state(step)).restore()

    assert names(step) == ("random state",)


def test_what_is_keyed_by_a_tensor_is_named_without_computing_on_its_device(monkeypatch):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(torch.nn.Parameter, "__repr__", lambda _: pytest.fail("a parameter was printed"))

    def step():
        model.train()
        optimizer.step()

    names = list(find_state(step).tensors.values())

    assert "optimizer.state.model.weight.exp_avg" in names


def test_cycles_and_shared_things_are_met_once():
    first = nn.Linear(2, 1)
    box = {"a": first, "b": first}
    box["self"] = box

    def step(x):
        return box

    found = find_state(step)

    assert len(found.tensors) == 2
    assert found.names() == ("box.a (Linear, 2 tensors)", "random state")


@pytest.mark.parametrize("kind", [iter([]), (i for i in ()), zip([]), iter(DataLoader([1]))])
def test_iterators_are_noticed(kind):
    def step(x):
        return next(kind)

    assert find_state(step).iterators == ["kind"]


def test_an_open_file_is_no_iterator_to_take_data_from(tmp_path):
    with (tmp_path / "log").open("w") as log:

        def step(x):
            log.write("x")

        assert find_state(step).iterators == []


# Restoring


def everything():
    """Something of every kind that a step can change, and a function that changes all of it."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.grad = torch.ones(3)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plain = {"list": [1, 2], "set": {1}, "deque": collections.deque([1]), "dict": {"a": 1}, "tensor": torch.zeros(2)}
    generator = torch.Generator().manual_seed(1)
    others = {"python": random.Random(1), "numpy": np.random.default_rng(1)}
    array = np.zeros(3)
    number = 3

    def change():
        nonlocal number
        global COUNT  # noqa: PLW0603 - what is tested
        number += 1
        COUNT += 1
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 2)).mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        model.eval()
        model[0].bias.requires_grad_(False)
        model.register_buffer("new", torch.ones(1))
        plain["list"].append(3)
        plain["set"].add(2)
        plain["deque"].appendleft(0)
        plain["dict"]["b"] = plain["list"]
        plain["tensor"].add_(1)
        plain["more"] = 1
        random.random()
        np.random.rand()
        torch.rand(1, generator=generator)
        others["python"].random()
        others["numpy"].random()
        array[1] = 7

    def look():
        return {
            "number": number,
            "COUNT": COUNT,
            "model": {k: v.tolist() for k, v in model.state_dict().items()},
            "grads": [p.grad if p.grad is None else p.grad.tolist() for p in model.parameters()],
            "requires_grad": [p.requires_grad for p in model.parameters()],
            "modes": [m.training for m in model.modules()],
            "optimizer": repr(optimizer.state_dict()),
            "scaler": repr(scaler.state_dict()) + repr(scaler._per_optimizer_states) + repr(scaler._scale),
            "scheduler": scheduler.state_dict(),
            "plain": repr(plain),
            "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
            "generator": generator.get_state().tolist(),
            "others": (others["python"].getstate(), others["numpy"].bit_generator.state),
            "array": array.tolist(),
        }

    return change, look


def test_everything_that_a_step_changes_comes_back():
    change, look = everything()
    before = look()
    saved = Saved(find_state(change))

    change()
    changed = look()
    saved.restore()

    assert all(changed[key] != value for key, value in before.items())
    assert look() == before


def test_what_has_changed_is_named():
    change, _ = everything()
    found = find_state(change)
    saved = Saved(found, values=False)

    assert saved.changes() == []
    change()

    changed = saved.changes(ignore=found.norm_buffers())
    for name in (
        "COUNT",
        "number",
        "plain.list",
        "plain.set",
        "plain.deque",
        "plain.dict.b",
        "plain.more",
        "plain.tensor",
        "array",
        "model.0.weight",
        "optimizer.param_groups.0.lr",
        "scheduler.last_epoch",
    ):
        assert name in changed
    assert not any("training" in name or "running" in name for name in changed)


def test_an_equal_value_and_a_module_that_keeps_a_tensor_are_no_change():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = None
            self.calls = 0

    module, name, memo = Keeps(), ["a", "b"][0], {"device": torch.device("cpu")}

    def step(x):
        return module, name, memo

    saved = Saved(find_state(step), values=False)
    module.last = torch.ones(2)
    memo["device"] = torch.device("cpu")
    assert saved.changes() == []

    module.calls += 1
    assert saved.changes() == ["module.calls"]


def test_a_tensor_made_by_autograd_is_restored_by_its_name():
    box = {"hidden": (torch.ones(2, requires_grad=True) * 2)}
    kept = box["hidden"]

    def step(x):
        return box

    saved = Saved(find_state(step))
    box["hidden"] = kept.detach()
    saved.restore()

    assert box["hidden"] is kept


def test_a_resized_tensor_gets_its_shape_back():
    tensor = torch.arange(3.0)

    def step(x):
        return tensor

    saved = Saved(find_state(step))
    tensor.resize_(5).fill_(7)
    saved.restore()

    assert tensor.tolist() == [0, 1, 2]
