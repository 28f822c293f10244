"""A guarded run ends with the numbers of the run that had all the memory."""

import math

import pytest
import torch
import training as catalogue
from training import EXACT, OPTIMIZERS, REFUSED, assert_same, batches, snapshot

from oomguard import oom_guard
from oomguard.errors import SplitError
from oomguard.testing import simulate_oom

STEPS = 20


def train(make, count, size, guard=None, capacity=None):
    """Train and return the final state and the losses."""
    run = make()
    losses = []
    for i, (x, y) in enumerate(batches(count, size)):
        if guard is None:
            losses.append(run.step(x, y))
        else:
            with simulate_oom(capacity):
                losses.append(guard.run(run.step, x, y))
        run.after(i)
    return snapshot(run), losses


def capacity_for(make, size):
    """The least capacity at which a batch of *size* trains whole, with all that belongs to it, and none much larger."""
    peaks = []
    for n in (size, size + 1):
        run = make()
        with simulate_oom("1TiB") as simulation:
            for i, (x, y) in enumerate(batches(4, n)):
                run.step(x, y)
                run.after(i)
        peaks.append(simulation.peak_bytes)
    return sum(peaks) // 2


@pytest.mark.parametrize(("items", "limit", "pieces"), [(15, 8, 2), (13, 5, 3), (15, 4, 4), (15, 2, 8)])
@pytest.mark.parametrize("make", EXACT)
def test_a_guarded_run_equals_the_unguarded_one(make, items, limit, pieces):
    expected, expected_losses = train(make, STEPS, items)
    guard = oom_guard()
    name = make().step.__qualname__
    if items == 13:  # halves of 13 are 7 and 4: what a probe or an earlier run has learnt makes thirds
        guard.load_state_dict({"limits": {name: [{"size": limit, "shapes": [[catalogue.FEATURES], []]}]}})

    with guard:
        actual, losses = train(make, STEPS, items, guard, capacity_for(make, limit))

    assert_same(actual, expected)
    assert_same(losses, expected_losses)
    assert (guard.limit, math.ceil(items / guard.limit)) == (limit, pieces)
    assert guard.report.split_calls == STEPS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_same_update(name):
    def make():
        return catalogue.plain(OPTIMIZERS[name])

    expected, _ = train(make, STEPS, 13)

    with oom_guard() as guard:
        actual, _ = train(make, STEPS, 13, guard, capacity_for(make, 4))

    assert_same(actual, expected)
    assert guard.limit == 4


def test_sparse_gradients_are_gathered_as_well():
    expected, _ = train(catalogue.sparse, STEPS, 13)
    limit = {"size": 4, "shapes": [[catalogue.FEATURES], []]}

    with oom_guard() as guard:
        guard.load_state_dict({"limits": {catalogue.sparse().step.__qualname__: [limit]}})
        actual, _ = train(catalogue.sparse, STEPS, 13, guard, "1GiB")

    assert_same(actual, expected)
    assert guard.report.split_calls == STEPS


@pytest.mark.parametrize("name", catalogue.SCHEDULERS)
def test_every_scheduler_counts_one_step(name):
    def make():
        return catalogue.scheduled(catalogue.SCHEDULERS[name])

    expected, _ = train(make, 8, 13)

    with oom_guard() as guard:
        actual, _ = train(make, 8, 13, guard, capacity_for(make, 4))

    assert actual["lr"] == expected["lr"]
    assert_same(actual["model"], expected["model"])
    assert guard.limit == 4


def test_skipped_updates_are_skipped_in_pieces_too():
    final, _ = train(catalogue.scaler_skips, STEPS, 13)

    assert final["scaler"]["scale"] < 1024
    assert 0 < final["scheduler"]["last_epoch"] < STEPS


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_step_that_can_not_be_held_back_is_refused_by_name_and_undone(make):
    run = make()
    ((x, y),) = batches(1, 13)
    run.step(*batches(2, 13)[1])  # gives optimizers their state
    before = snapshot(run)
    random = torch.get_rng_state()

    with oom_guard() as guard, simulate_oom(capacity_for(make, 7)), pytest.raises(SplitError) as caught:
        guard.run(run.step, x, y)

    assert REFUSED[make] in str(caught.value)
    assert "update='each'" in str(caught.value)
    assert_same(snapshot(run), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("make", [*EXACT, *REFUSED], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_each_piece_can_be_a_step_of_its_own(make):
    expected = make()
    for i, (x, y) in enumerate(batches(4, 14)):
        for half in range(2):
            expected.step(x[half * 7 : half * 7 + 7], y[half * 7 : half * 7 + 7])
        expected.after(i)
    actual = make()

    with oom_guard(update="each") as guard:
        for i, (x, y) in enumerate(batches(4, 14)):
            with simulate_oom(capacity_for(make, 7)):
                guard.run(actual.step, x, y)
            actual.after(i)

    assert_same(snapshot(actual), snapshot(expected), rtol=0, atol=0)
    assert guard.limit == 7
