"""What an attempt has changed comes back, whatever it was; what can't come back is named."""

import pytest
import torch
from torch import nn

from oomguard import oom_guard
from oomguard.errors import RestoreError
from oomguard.recovery import Entry
from oomguard.testing import simulate_oom

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


def runs_out_above(capacity, change):
    """A step that changes something and then runs out above *capacity* items."""

    def step(x):
        change(x)
        if len(x) > capacity:
            raise torch.OutOfMemoryError(OOM)

    return step


class Counting(nn.Module):
    """Counts its calls in a buffer, as codebooks and spectral norms do."""

    def __init__(self, size=1):
        super().__init__()
        self.register_buffer("calls", torch.zeros(size))

    def forward(self, x):
        self.calls.add_(1)
        return x


@pytest.mark.parametrize("before", [0, 1, 3])
def test_buffers_that_calls_write_come_back_in_the_first_call_and_later(before):
    model = Counting()
    step = runs_out_above(4, model)

    with oom_guard(update="each") as guard:
        for _ in range(before):
            guard.run(step, torch.ones(4))
        guard.run(step, torch.ones(8))

    assert model.calls.item() == before + 2


def test_large_tensors_that_calls_write_are_named_and_not_copied_in_every_call():
    model = Counting(2**19)
    step = runs_out_above(4, model)

    with oom_guard(update="each") as guard:
        guard.run(step, torch.ones(4))
        guard.run(step, torch.ones(4))
        with pytest.raises(RestoreError, match=r"change\.calls"):
            guard.run(step, torch.ones(8))


def test_large_tensors_come_back_in_the_first_call_and_with_a_snapshot():
    for before, options in ((0, {}), (2, {"snapshot": True})):
        model = Counting(2**19)
        step = runs_out_above(4, model)

        with oom_guard(update="each", **options) as guard:
            for _ in range(before):
                guard.run(step, torch.ones(4))
            guard.run(step, torch.ones(8))

        assert model.calls[0].item() == before + 2


def test_entries_added_to_a_long_list_are_taken_back():
    history, short, table = list(range(100)), [], {}

    def change(x):
        history.append(len(x))
        short.append(len(x))
        table["last"] = len(x)

    with oom_guard(update="each") as guard:
        guard.run(runs_out_above(4, change), torch.ones(8))

    assert history[100:] == [4, 4]
    assert short == [4, 4]
    assert table == {"last": 4}


def test_names_that_a_step_rebinds_come_back():
    count = 0

    def change(x):
        nonlocal count
        count += 1

    with oom_guard(update="each") as guard:
        guard.run(runs_out_above(4, change), torch.ones(8))

    assert count == 2


def test_modes_come_back():
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    seen = []

    class Watching:
        @staticmethod
        def note():
            seen.append(model.training)

    def step(x):
        Watching.note()
        model.eval()
        if len(x) > 4:
            raise torch.OutOfMemoryError(OOM)
        model.train()

    with oom_guard(update="each") as guard:
        guard.run(step, torch.ones(8))

    assert seen == [True] * 3


def test_an_update_that_leaves_no_trace_in_versions_is_named_too():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def change(x):
        model(x).mean().backward()
        optimizer.step()

    step = runs_out_above(4, change)
    with oom_guard() as guard:
        guard.run(step, torch.ones(4, 3))
        with pytest.raises(RestoreError, match="the update of Adam"):
            guard.run(step, torch.ones(8, 3))


def test_state_that_an_update_was_creating_for_a_new_parameter_is_dropped_again():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters())

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return model, optimizer, step

    x = torch.ones(4, 3, dtype=torch.float64)
    expected, _, step = make()
    step(x)
    expected[0].requires_grad_(True)
    step(x)
    exact = 0
    for allocation in range(1, 40):
        model, optimizer, step = make()
        with oom_guard() as guard:
            guard.run(step, x)
            model[0].requires_grad_(True)
            with simulate_oom(fail_at=allocation):
                try:
                    guard.run(step, x)
                except RestoreError:
                    assert len(optimizer.state) == 2  # what was there before
                    continue
        exact += guard.report.ooms
        assert len(optimizer.state) == 4
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)

    assert exact > 15


def test_a_gradient_changed_in_place_can_not_come_back():
    model = nn.Linear(3, 1)
    model.weight.grad = torch.ones(1, 3)
    step = runs_out_above(4, lambda x: model.weight.grad.mul_(2))

    with oom_guard() as guard:
        guard.run(step, torch.ones(4, 3))
        with pytest.raises(RestoreError, match="a gradient that was there at entry"):
            guard.run(step, torch.ones(8, 3))


def test_a_gradient_changed_in_place_comes_back_with_a_snapshot():
    model = nn.Linear(3, 1)
    model.weight.grad = torch.ones(1, 3)
    step = runs_out_above(4, lambda x: model.weight.grad.mul_(2))

    with oom_guard(snapshot=True, update="each") as guard:
        guard.run(step, torch.ones(4, 3))
        guard.run(step, torch.ones(8, 3))

    assert model.weight.grad.tolist() == [[8.0] * 3]


def test_no_room_for_what_an_attempt_notes_is_met_by_emptying_the_cache(mocker):
    real, left = Entry.__init__, [1]

    def once(self, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError(OOM)
        real(self, *args, **kwargs)

    mocker.patch.object(Entry, "__init__", once)
    emptied = mocker.patch("oomguard.memory.device._Host.empty_cache")

    with oom_guard() as guard:
        assert guard.run(torch.sum, torch.ones(4)) == 4

    emptied.assert_called_once()


def test_another_error_while_noting_passes_through(mocker):
    mocker.patch.object(Entry, "__init__", side_effect=RuntimeError("something else"))

    with oom_guard() as guard, pytest.raises(RuntimeError, match="something else"):
        guard.run(torch.sum, torch.ones(4))


def test_a_hook_on_an_accumulated_gradient_sees_all_of_it_while_the_batch_is_whole():
    model = nn.Linear(3, 1, bias=False)
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def step(x):
        model(x).mean().backward()

    with oom_guard() as guard:
        for _ in range(2):
            guard.run(step, torch.ones(4, 3))

    torch.testing.assert_close(seen, [torch.ones(1, 3), torch.full((1, 3), 2.0)])


def test_gradients_of_single_samples_by_functional_transforms_are_exact():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(8, 3, dtype=torch.float64)

    def step(x):
        slopes = torch.func.vmap(torch.func.grad(lambda one: torch.tanh(model(one)).sum()))(x)
        loss = (model(x) + slopes.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss.detach()

    expected = step(x)
    gradient, model.weight.grad, model.bias.grad = model.weight.grad.clone(), None, None

    with simulate_oom(fail_at=9), oom_guard() as guard:
        loss = guard.run(step, x)

    assert guard.limit == 4
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.weight.grad, gradient)
