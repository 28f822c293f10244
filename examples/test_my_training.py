"""
Unit-test a training loop against running out of memory: `pytest examples/test_my_training.py`.

Needs no GPU: the plugin that comes with oomguard simulates a device, and real
out-of-memory errors are raised at real operations.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oomguard import oom_guard
from oomguard.testing import simulate_oom


def train(batches: list[torch.Tensor]) -> tuple[nn.Module, int | None]:
    """Train a small autoencoder as in production; return it, and the largest piece that it ended with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64)).double()
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with oom_guard() as guard:
        for batch in batches:
            guard.run(step, batch)
    return model, guard.limit


@pytest.fixture
def batches() -> list[torch.Tensor]:
    """Ten batches of 256 items."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(256, 64, dtype=torch.float64, generator=generator) for _ in range(10)]


def test_a_small_device_trains_to_the_same_weights(batches: list[torch.Tensor]) -> None:
    """The batch does not fit the small device, so it runs in pieces, and nothing else differs."""
    expected, whole = train(batches)

    with simulate_oom("512KiB"):
        actual, limit = train(batches)

    assert whole is None
    assert limit is not None
    assert limit < 256
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("allocation", [10, 40, 70])
def test_an_error_at_any_allocation_changes_nothing(batches: list[torch.Tensor], allocation: int) -> None:
    """Memory may run out in the forward, in the backward, or in the optimizer's first step."""
    expected, _ = train(batches)

    with simulate_oom(fail_at=allocation):
        actual, _ = train(batches)

    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.oom_capacity("16MiB")
def test_training_needs_less_than_16_mib(batches: list[torch.Tensor], oom_simulation) -> None:  # noqa: ANN001
    """The marker simulates the device for the whole test; the fixture tells what was used."""
    _, limit = train(batches)

    assert limit is None
    assert oom_simulation.peak_bytes < 2**24
