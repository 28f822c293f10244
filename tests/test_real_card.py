"""
On a card: the answer is the true maximum there, predictions hold, and training goes on after an error.

`pytest -m cuda` runs them on the card that is there, `pytest -m cuda --fake-gpu=4GiB` without one.
"""

import pytest
import torch
from torch import nn

from oomguard import Input, fit_batch, oom_guard, predict
from oomguard.memory.replay import Replay
from oomguard.memory.trace import AllocatorHistory

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
INPUTS = {"x": Input(3, 64, 64), "y": Input(dtype=torch.long, high=10)}


@pytest.fixture
def train():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten()
    ).append(nn.Linear(4096, 10))
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batch(size):
    return torch.empty(size, 3, 64, 64, device="cuda"), torch.zeros(size, dtype=torch.long, device="cuda")


@pytest.fixture
def small_card():
    """Leave a gigabyte, so that sizes stay small on a large card."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2**30 / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("small_card")
def test_replaying_ends_where_bisecting_does(train):
    found = fit_batch(inputs=INPUTS, headroom=0)(train).probe()
    true = fit_batch(inputs=INPUTS, headroom=0, search="bisect")(train).probe()

    assert 0.985 * true.batch_size <= found.batch_size <= 1.015 * true.batch_size
    assert sum(not trial.passed for trial in found.trials) <= 1


def test_peaks_are_predicted(train):
    device = torch.device("cuda", torch.cuda.current_device())

    def trace(size):
        history = AllocatorHistory(device)
        for _ in range(3):
            train(*batch(size))
            history.step_ended()
        return history.close(size)

    trace(64)
    replay = Replay.from_traces([trace(64), trace(128)])
    for size in (256, 512):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trace(size)
        assert replay.run(size).allocated_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.03)


@pytest.mark.usefixtures("small_card")
@pytest.mark.filterwarnings("ignore::oomguard.errors.OOMGuardWarning")  # batch norm
def test_a_batch_that_does_not_fit_is_trained_in_pieces_and_nothing_is_held(train):
    with oom_guard() as guard:
        guard.run(train, *batch(8))
        guard.run(train, *batch(1600))
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            with oom_guard() as fresh:
                loss = fresh.run(train, *batch(1600))
            assert fresh.report.ooms >= 1
            assert loss.dim() == 0
    del loss, fresh  # a guard keeps copies of the running statistics

    assert torch.cuda.memory_allocated() <= before


def test_a_prediction_needs_no_room_for_what_it_predicts(train):
    found = predict(train, inputs=INPUTS, capacity="80GiB")

    assert found.largest > 1000
    assert found.traced_on.startswith("cuda")
