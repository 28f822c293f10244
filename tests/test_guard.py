"""What the guard does around a step: when it acts, what it says, and what it leaves alone."""

import contextlib
import copy
import logging
import pickle
import threading
import weakref

import pytest
import torch
import training as catalogue
from torch import nn
from training import assert_same, batches, snapshot

from oomguard import BatchLimitError, Input, current_guard, fit_batch, oom_guard
from oomguard.errors import InputError, OOMGuardWarning, RestoreError, SplitError
from oomguard.memory.device import _Host
from oomguard.testing import simulate_oom

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."
FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 1.00 GiB is "
    "free. Of the allocated memory 9.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but "
    "unallocated."
)


class Recorder:
    """A step that runs out above some number of items and remembers what it was given."""

    def __init__(self, capacity, error=None, times=None):
        self.capacity, self.times = capacity, times
        self.error = error or torch.OutOfMemoryError(OOM)
        self.seen = []

    def __call__(self, x, y=None):
        Recorder.log.append(len(x))
        if len(x) > self.capacity and (self.times is None or Recorder.log.count(len(x)) <= self.times):
            raise copy.copy(self.error)
        return x * 2

    log: list[int] = []  # noqa: RUF012 - on the class, which the guard does not take for the step's state


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(Recorder, "log", [])
    return Recorder.log


# Sizes


@pytest.mark.parametrize(
    ("items", "capacity", "sizes"),
    [
        (8, 8, [8]),
        (8, 4, [8, 4, 4]),
        (8, 3, [8, 4, 2, 2, 2, 2]),
        (5, 4, [5, 3, 2]),
        (13, 4, [13, 7, 4, 3, 3, 3]),
        (3, 1, [3, 2, 1, 1, 1]),
        (2, 1, [2, 1, 1]),
    ],
)
def test_the_same_batch_runs_again_in_halves_of_the_original(log, items, capacity, sizes):
    x = torch.arange(items)

    with oom_guard() as guard:
        result = guard.run(Recorder(capacity), x)

    assert log == sizes
    assert torch.equal(result, x * 2)


def test_the_limit_is_remembered(log):
    step = Recorder(3)

    with oom_guard() as guard:
        guard.run(step, torch.ones(8))
        guard.run(step, torch.ones(8))
        guard.run(step, torch.ones(3))

    assert log == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]
    assert (guard.limit, guard.report.ooms, guard.report.split_calls, guard.report.calls) == (2, 2, 3, 3)


def test_a_limit_holds_for_larger_items_and_says_nothing_of_smaller_ones(log):
    step = Recorder(3)

    with oom_guard() as guard:
        guard.run(step, torch.ones(4, 10))
        log.clear()
        guard.run(step, torch.ones(4, 12))
        step.capacity = 4
        guard.run(step, torch.ones(4, 9))
        guard.run(step, torch.ones(4, 10, 1))

    assert log == [2, 2, 4, 4]


def test_a_limit_can_grow_back(log):
    step = Recorder(3)

    with oom_guard(grow_after=2) as guard:
        guard.run(step, torch.ones(16))  # pieces of 2, and that is the first good call
        step.capacity = 99
        limits = []
        for _ in range(8):
            guard.run(step, torch.ones(16))
            limits.append(guard.limit)

    assert limits == [4, 4, 8, 8, None, None, None, None]
    assert [event.kind for event in guard.report.events] == ["out of memory"] * 3 + ["grown"] * 3
    assert log[-3:] == [16, 16, 16]


def test_pieces_are_no_smaller_than_allowed(log):
    with oom_guard(min_batch_size=2) as guard:
        guard.run(Recorder(3), torch.ones(13))

    assert log == [13, 7, 4, 3, 2, 2, 2, 2, 2]


def test_few_distinct_sizes_are_seen_so_that_compilers_see_few(log):
    with oom_guard() as guard:
        for _ in range(5):
            guard.run(Recorder(9), torch.ones(128))

    assert set(log) == {128, 64, 32, 16, 8}


def test_a_function_made_anew_for_every_batch_is_the_same_step():
    offset, x = torch.zeros(1), torch.ones(40)
    sizes = []

    with oom_guard() as guard:
        for _ in range(3):
            with simulate_oom(100):
                guard.run(lambda x: (x + offset).mean(), x)
            sizes.append((guard.limit, guard.report.ooms))

    assert sizes == [(20, 1)] * 3


# When it acts


def decorated(log, capacity=99):
    @fit_batch(inputs={"x": Input(3)})
    def step(x):
        Recorder.log.append((len(x), current_guard() is not None))
        if len(x) > capacity:
            raise torch.OutOfMemoryError(OOM)
        return x.mean()

    return step


def test_without_a_guard_a_decorated_step_is_a_plain_call(log):
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        decorated(log, 1)(torch.ones(4, 3))

    assert log == [(4, False)]


def test_inside_a_guard_a_decorated_step_is_guarded(log):
    with oom_guard() as guard:
        assert current_guard() is guard
        assert decorated(log, 2)(torch.ones(4, 3)) == 1

    assert current_guard() is None
    assert [size for size, _ in log] == [4, 2, 2]


def test_a_guard_that_is_not_enabled_does_nothing(log):
    with oom_guard(enabled=False) as guard, pytest.raises(torch.OutOfMemoryError):
        guard.run(decorated(log, 1), torch.ones(4, 3))

    assert current_guard() is None
    assert log == [(4, False)]


def test_the_innermost_guard_wins(log):
    step = decorated(log, 2)

    with oom_guard() as outer, oom_guard() as inner:
        step(torch.ones(4, 3))
        outer.run(step, torch.ones(1, 3))

    assert (outer.report.ooms, inner.report.ooms) == (0, 1)


def test_a_decorated_step_inside_a_guarded_step_runs_plain(log):
    inner = decorated(log, 2)

    @fit_batch(inputs={"x": Input(3)})
    def outer(x):
        return inner(x) + guard.run(inner, x)

    with oom_guard() as guard:
        assert outer(torch.ones(4, 3)) == 2

    assert [size for size, _ in log] == [4, 2, 2, 2, 2]
    assert guard.report.calls == 1


def test_run_works_without_a_with_block(log):
    assert oom_guard().run(Recorder(2), torch.ones(4)).shape == (4,)


def test_other_threads_do_not_see_the_guard(log):
    step = decorated(log, 2)
    errors = []

    def call():
        try:
            step(torch.ones(4, 3))
        except torch.OutOfMemoryError as error:
            errors.append(str(error))

    with oom_guard() as guard:
        step(torch.ones(1, 3))
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    assert errors == [OOM]
    assert guard.report.calls == 1


def test_overlapping_guards_leave_pytorch_as_it_was():
    engine = torch.autograd._engine_run_backward
    scheduler = vars(torch.optim.lr_scheduler.LRScheduler)["step"]
    first, second = oom_guard(), oom_guard()

    first.__enter__()
    other = threading.Thread(target=second.__enter__)
    other.start()
    other.join()
    assert torch.autograd._engine_run_backward is not engine
    first.__exit__(ValueError, ValueError(), None)
    assert torch.autograd._engine_run_backward is not engine
    second._entered.pop()[0].close()

    assert torch.autograd._engine_run_backward is engine
    assert vars(torch.optim.lr_scheduler.LRScheduler)["step"] is scheduler


def test_all_backwards_go_through_one_door(mocker):
    """The mechanism stands at a private function of PyTorch; this fails when it moves."""
    x = torch.ones(2, requires_grad=True)
    door = mocker.spy(torch.autograd, "_engine_run_backward")

    x.sum().backward()
    torch.autograd.backward(x.sum())
    torch.autograd.grad(x.sum(), x)

    assert door.call_count == 3
    assert [call.kwargs.get("accumulate_grad") for call in door.call_args_list] == [True, True, False]


# What passes through


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Expected more than 1 value per channel when training"),
        RuntimeError("index out of range in self"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling 'cublasCreate(handle)'"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        MemoryError(),
        KeyboardInterrupt(),
    ],
)
def test_what_no_smaller_batch_cures_passes_through_at_once(log, error):
    def step(x):
        Recorder.log.append(len(x))
        raise error

    with oom_guard() as guard, pytest.raises(type(error)) as caught:
        guard.run(step, torch.ones(8))

    assert caught.value is error
    assert log == [8]
    assert guard.report.ooms == 0


@pytest.mark.parametrize("error", [ValueError("bad piece"), KeyboardInterrupt()])
def test_an_error_in_a_piece_passes_through_with_everything_back(error):
    run = catalogue.accumulation_over_calls()
    (x, y), *_ = batches(1, 8)
    run.step(x, y)
    before = snapshot(run)
    random = torch.get_rng_state()

    def step(x, y):
        torch.rand(1)
        if len(x) > 4:
            raise torch.OutOfMemoryError(OOM)
        run.step(x, y)
        raise error

    with oom_guard() as guard, pytest.raises(type(error)) as caught:
        guard.run(step, x, y)

    assert caught.value is error
    assert "raised in a piece of a batch" in error.__notes__[0]
    assert_same(snapshot(run), before, rtol=0, atol=0)
    assert torch.equal(random, torch.get_rng_state())


def test_a_size_limit_is_met_by_smaller_pieces(log):
    with oom_guard() as guard:
        guard.run(Recorder(4, RuntimeError("input tensor must fit into 32-bit index math")), torch.ones(8))

    assert log == [8, 4, 4]
    assert [event.kind for event in guard.report.events] == ["size limit"]
    assert guard.report.ooms == 0


AMBIGUOUS = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")


@pytest.mark.parametrize(
    ("short", "passed", "sizes"),
    [(True, True, [1, 8, 4, 2, 2, 2, 2]), (False, True, [1, 8]), (True, False, [8])],
)
def test_an_ambiguous_error_is_met_only_where_memory_is_short_and_a_smaller_batch_has_passed(
    log, mocker, short, passed, sizes
):
    mocker.patch("oomguard.memory.device._Host.is_short", return_value=short)
    step = Recorder(3, AMBIGUOUS)

    with oom_guard() as guard:
        if passed:
            guard.run(step, torch.ones(1))
        if short and passed:
            guard.run(step, torch.ones(8))
        else:
            with pytest.raises(RuntimeError, match="CUDNN_STATUS_INTERNAL_ERROR"):
                guard.run(step, torch.ones(8))

    assert log == sizes


def test_an_ambiguous_error_is_met_twice_and_then_raised(log, mocker):
    mocker.patch("oomguard.memory.device._Host.is_short", return_value=True)
    step = Recorder(1, AMBIGUOUS)

    with oom_guard() as guard:
        guard.run(step, torch.ones(1))
        with pytest.raises(RuntimeError, match="CUDNN_STATUS_INTERNAL_ERROR"):
            guard.run(step, torch.ones(16))

    assert log == [1, 16, 8, 4]


def test_fragmented_memory_is_tried_once_more_at_the_same_size(log):
    with oom_guard() as guard:
        guard.run(Recorder(4, torch.OutOfMemoryError(FRAGMENTED), times=1), torch.ones(8))
        assert guard.limit is None
        log.clear()
        guard.run(Recorder(4, torch.OutOfMemoryError(FRAGMENTED)), torch.ones(8))

    assert log == [8, 8, 4, 4]


# What it says


def test_a_shrink_is_one_log_line(log, caplog):
    def step(x):
        return (x * torch.ones(1000)).sum()

    with simulate_oom("20KiB"), oom_guard() as guard:
        guard.run(step, torch.ones(8, 1))

    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "oomguard: test_a_shrink_is_one_log_line.<locals>.step: out of memory at 8 items, going on with pieces of 4; "
        "peak 3.94 KiB of 20.00 KiB (CUDA out of memory. Tried to allocate 31.25 KiB. GPU 0 has a total capacity of "
        "20.00 KiB of ...)"
    )


def test_every_event_is_told(log):
    told = []

    with oom_guard(on_event=told.append) as guard:
        guard.run(Recorder(2), torch.ones(8))

    assert tuple(told) == guard.report.events
    assert [(e.call, e.kind, e.batch_size, e.old_size, e.new_size) for e in told] == [
        (1, "out of memory", 8, 8, 4),
        (1, "out of memory", 8, 4, 2),
    ]
    assert told[0].reason == OOM


def test_where_the_smallest_piece_does_not_fit_the_error_tells_all_that_was_tried(log):
    with oom_guard(min_batch_size=2) as guard, pytest.raises(BatchLimitError) as caught:
        guard.run(Recorder(1), torch.ones(8))

    message = str(caught.value)
    for part in ("oomguard: Recorder runs out of memory even in pieces of 2", "batch of 8; tried 8, 4, 2", OOM):
        assert part in message
    assert caught.value.report == guard.report
    assert isinstance(caught.value, torch.OutOfMemoryError)


def test_an_error_outside_any_guarded_step_gets_a_note():
    x = torch.ones(2)

    with pytest.raises(torch.OutOfMemoryError) as caught, oom_guard(), simulate_oom(fail_at=1):
        x + 1

    assert caught.value.__notes__[0].startswith("oomguard: this out-of-memory error came from outside any guarded step")


def test_a_guard_that_guarded_nothing_warns_where_it_was_entered():
    with pytest.warns(OOMGuardWarning, match="saw no guarded call") as caught, oom_guard():
        pass

    assert caught[0].filename == __file__


def test_what_differs_by_nature_is_warned_about_once():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.ones(4, 3)

    def step(x):
        model(x).mean().backward()

    def train():
        with oom_guard() as guard:
            for _ in range(3):
                with simulate_oom(fail_at=3 if guard.limit is None else 1000):
                    guard.run(step, x)

    with pytest.warns(OOMGuardWarning, match="batch-norm statistics and dropout masks") as caught:
        train()

    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_nothing_differs_in_evaluation():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def step(x):
        model.eval()
        with torch.no_grad():
            return model(x)

    x = torch.randn(9, 3)
    with oom_guard() as guard, simulate_oom(fail_at=2):
        pieces = guard.run(step, x)

    torch.testing.assert_close(pieces, step(x))
    assert guard.limit == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_batch_size": 0}, "min_batch_size must be a whole number of at least 1, got 0"),
        ({"min_batch_size": True}, "min_batch_size must be a whole number of at least 1, got True"),
        ({"update": "some"}, "update must be one of 'whole', 'each', got 'some'"),
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or a function that counts, got 'max'"),
        ({"grow_after": 0}, "grow_after must be None or a whole number of at least 1, got 0"),
        ({"on_event": 3}, "on_event must be callable, got 3"),
    ],
)
def test_an_option_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^oomguard: {message}"):
        oom_guard(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "has no batch"),
        ((3,), "has no batch"),
        ((torch.ones(4), torch.ones(3)), "different batch sizes"),
        ((torch.ones(0),), "a batch of 0 items"),
        ((iter([torch.ones(2)]),), "is an iterator"),
    ],
)
def test_a_batch_that_can_not_be_split_is_refused_in_the_first_call(arguments, message):
    def step(*batch):
        return None

    with oom_guard() as guard, pytest.raises(InputError, match=message):
        guard.run(step, *arguments)


def test_a_step_that_takes_from_an_iterator_is_refused_in_the_first_call():
    source = iter([torch.ones(2)])

    def step(x):
        return x + next(source)

    with oom_guard() as guard, pytest.raises(InputError, match="takes from an iterator, 'source'"):
        guard.run(step, torch.ones(2))

    assert len(list(source)) == 1


# Checkpoints


def test_a_resumed_run_starts_with_what_was_learnt(log):
    step = Recorder(3)
    with oom_guard() as guard:
        guard.run(step, torch.ones(8, 2))
    state = pickle.loads(pickle.dumps(guard.state_dict()))
    log.clear()

    with oom_guard() as resumed:
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        resumed.run(step, torch.ones(8, 2))
        resumed.load_state_dict(state)

    assert log == [2, 2, 2, 2]
    assert resumed.state_dict() == state


@pytest.mark.parametrize("state", [{}, None, {"limits": {"step": [{"size": 3}]}}, {"limits": [1]}])
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match=r"^oomguard: load_state_dict takes what Guard\.state_dict"):
        oom_guard().load_state_dict(state)


def test_a_probed_step_starts_with_the_probes_answer(log):
    step = decorated(log, 99)
    step.probe(max_batch_size=4, capacity="1GiB")
    log.clear()

    with oom_guard() as guard:
        step(torch.ones(10, 3))

    assert [size for size, _ in log] == [4, 3, 3]
    assert (guard.limit, guard.report.ooms) == (4, 0)


# State


def adam_over(make=catalogue.adam):
    run = make()
    data = batches(3, 8)
    for x, y in data[:2]:
        run.step(x, y)
    return run, data[2]


def allocations_of(run, x, y):
    with simulate_oom("1GiB") as device:
        run.step(x, y)
    return device.allocations


def test_an_oom_in_a_later_optimizer_step_that_has_moved_something_is_an_error_that_names_it():
    run, (x, y) = adam_over()
    last = allocations_of(adam_over()[0], x, y)

    with oom_guard() as guard:
        guard.run(run.step, x, y)
        with simulate_oom(fail_at=last), pytest.raises(RestoreError) as caught:
            guard.run(run.step, x, y)

    message = str(caught.value)
    assert "memory ran out in plain.<locals>.step, and what it had written by then has no copy" in message
    assert "exp_avg of model.first.weight" in caught.value.changed
    assert f"{', '.join(caught.value.changed[:8])} and {len(caught.value.changed) - 8} more" in message
    assert "Go on from the last checkpoint; with oom_guard(snapshot=True)" in message


def test_with_a_snapshot_it_is_undone_and_run_again():
    run, (x, y) = adam_over()
    expected, _ = adam_over()
    last = allocations_of(adam_over()[0], x, y)
    for _ in range(2):
        expected.step(x, y)

    with oom_guard(snapshot=True) as guard:
        guard.run(run.step, x, y)
        with simulate_oom(fail_at=last):
            guard.run(run.step, x, y)

    assert guard.report.ooms == 1
    assert_same(snapshot(run), snapshot(expected))


def test_an_input_that_was_written_in_place_can_not_be_put_back():
    run = catalogue.input_in_place()
    (x, y), *_ = batches(1, 8)

    with simulate_oom(fail_at=3), oom_guard() as guard, pytest.raises(RestoreError, match="an input of the step"):
        guard.run(run.step, x, y)


@pytest.mark.filterwarnings("ignore::oomguard.errors.OOMGuardWarning")
def test_dropout_and_batch_norm_equal_those_of_the_same_pieces_without_a_failure():
    def make():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1)).double()
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def step(x):
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return catalogue.Training(step, {"model": model})

    data = [torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected, actual = make(), make()
    limits = {"limits": {make().step.__qualname__: [{"size": 6, "shapes": [[3]]}]}}
    torch.manual_seed(5)
    with oom_guard() as guard:
        guard.load_state_dict(limits)
        for x in data:
            guard.run(expected.step, x)
    torch.manual_seed(5)
    with oom_guard() as guard:
        with simulate_oom(fail_at=9):
            guard.run(actual.step, data[0])
        for x in data[1:]:
            guard.run(actual.step, x)

    assert guard.limit == 6
    assert_same(snapshot(actual), snapshot(expected), rtol=0, atol=0)


def test_gradients_kept_by_reference_hold_the_sums():
    run = catalogue.update_in_loop()
    (x, y), (x2, y2) = batches(2, 8)
    model = run.state["model"]
    expected = catalogue.update_in_loop()
    for a, b in ((x, y), (x2, y2)):
        expected.step(a, b)

    with oom_guard() as guard:
        guard.run(run.step, x, y)
        kept = [p.grad for p in model.parameters()]
        guard.run(run.step, x2, y2)

    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert_same(kept, [p.grad for p in expected.state["model"].parameters()], rtol=0, atol=0)


def test_gradients_in_one_flat_buffer_stay_there():
    model = nn.Linear(3, 2).double()
    flat = torch.zeros(8, dtype=torch.float64)
    model.weight.grad, model.bias.grad = flat[:6].view(2, 3), flat[6:]

    def step(x):
        model(x).mean().backward()

    with oom_guard() as guard:
        guard.run(step, torch.ones(4, 3, dtype=torch.float64))

    torch.testing.assert_close(flat, torch.full((8,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("allocation", range(1, 40))
def test_gradients_there_at_entry_survive_an_oom_anywhere(allocation):
    expected, run = catalogue.update_in_loop(), catalogue.update_in_loop()
    (x, y), (x2, y2) = batches(2, 8)
    for training in (expected, run):
        training.step(x, y)
    expected.step(x2, y2)

    with simulate_oom(fail_at=allocation), oom_guard() as guard:
        guard.run(run.step, x2, y2)

    assert_same(snapshot(run), snapshot(expected))


def test_a_model_that_the_code_does_not_reveal_is_found_when_it_trains():
    """The registry is a library's object, which is not searched; its parameters are met by backward and optimizer."""
    hidden = adam_over()[0]
    registry = weakref.WeakValueDictionary()
    keep = hidden.step
    registry["step"] = keep

    def step(x, y):
        return registry["step"](x, y)

    expected = adam_over()[0]
    (x, y), *_ = batches(1, 8)
    last = allocations_of(adam_over()[0], x, y)
    expected.step(x, y)

    with (
        simulate_oom(fail_at=last),
        oom_guard() as guard,
        pytest.warns(OOMGuardWarning, match=r"step trains 4 parameters that were not found .* oom_guard\(state=...\)"),
    ):
        guard.run(step, x, y)

    assert_same(snapshot(hidden), snapshot(expected))


def test_given_state_is_known_from_the_start(recwarn):
    hidden = adam_over()[0]
    registry = weakref.WeakValueDictionary()
    keep = hidden.step
    registry["step"] = keep

    def step(x, y):
        return registry["step"](x, y)

    with oom_guard(state=[hidden.state["model"], hidden.state["opt"]]) as guard:
        guard.run(step, *batches(1, 8)[0])

    assert not recwarn.list


def test_fragmented_memory_is_tried_again_with_the_whole_update():
    run, expected = catalogue.adam(), catalogue.adam()
    (x, y), *_ = batches(1, 8)
    expected.step(x, y)

    class Once:
        left = 1

    def step(x, y):
        loss = run.step(x, y)
        Once.left -= 1
        if Once.left == 0:
            raise torch.OutOfMemoryError(FRAGMENTED)
        return loss

    with oom_guard() as guard:
        guard.run(step, x, y)

    assert guard.limit is None
    assert (guard.report.ooms, guard.report.events[0].new_size) == (1, 8)
    assert_same(snapshot(run), snapshot(expected), rtol=0, atol=0)


def test_a_refusal_teaches_no_limit():
    run = catalogue.closure()
    (x, y), *_ = batches(1, 8)

    with oom_guard() as guard:
        with simulate_oom(fail_at=5), pytest.raises(SplitError):
            guard.run(run.step, x, y)
        assert guard.limit is None
        guard.run(run.step, x, y)


def test_a_batch_that_can_not_be_cut_without_too_small_pieces_is_at_its_limit(log):
    with oom_guard(min_batch_size=2) as guard, pytest.raises(BatchLimitError, match="pieces of 3"):
        guard.run(Recorder(2), torch.ones(3))

    assert log == [3]


def test_a_new_model_is_looked_up_again():
    box = {"run": catalogue.adam()}

    def make():
        run = catalogue.adam()
        step = run.step
        return run, step

    _, step = make()

    def call(x, y):
        return step(x, y)

    (x, y), *_ = batches(1, 8)
    with oom_guard() as guard:
        guard.run(call, x, y)
        run, step = make()
        expected, _ = make()
        expected.step(x, y)
        with simulate_oom(fail_at=20):
            guard.run(call, x, y)

    assert box
    assert_same(snapshot(run), snapshot(expected))


# Losses over something else than items


def token_loss(reduction):
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()

    def step(x, mask):
        losses = nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long), reduction="none") * mask
        loss = losses.sum() / mask.sum() if reduction == "mean" else losses.sum()
        loss.backward()
        return loss.detach()

    return model, step


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_over_tokens_and_sums_are_weighted_right(reduction):
    x = torch.randn(8, 4, dtype=torch.float64)
    mask = torch.tensor([1.0, 1, 1, 0, 0, 1, 0, 0], dtype=torch.float64)
    expected, whole = token_loss(reduction)
    expected_loss = whole(x, mask)
    actual, step = token_loss(reduction)

    with simulate_oom(fail_at=2), oom_guard(reduction="sum" if reduction == "sum" else lambda _, mask: mask.sum()) as g:
        loss = g.run(step, x, mask)

    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(actual.weight.grad, expected.weight.grad)


def test_a_count_of_nothing_is_refused():
    x = torch.ones(4)
    with simulate_oom(fail_at=1), oom_guard(reduction=lambda _: 0) as guard, pytest.raises(InputError, match="counted"):
        guard.run(lambda x: x.mean(), x)


def test_pieces_without_a_count_change_nothing():
    """The mean over nothing is not a number; its piece has no share."""
    x = torch.randn(4, 4, dtype=torch.float64)
    mask = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)
    expected, whole = token_loss("mean")
    expected_loss = whole(x, mask)
    actual, step = token_loss("mean")

    with simulate_oom(fail_at=2), oom_guard(reduction=lambda _, mask: mask.sum()) as guard:
        loss = guard.run(step, x, mask)

    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(actual.weight.grad, expected.weight.grad)


# Memory


def test_when_it_tries_again_nothing_of_the_failed_attempt_is_alive(mocker):
    class Seen:
        references: list[weakref.ref[torch.Tensor]] = []  # noqa: RUF012 - on a class: not the step's state

    alive = []
    mocker.patch(
        "oomguard.memory.device._Host.empty_cache",
        side_effect=lambda: alive.append([ref() is not None for ref in Seen.references]),
    )
    model = nn.Linear(4, 4)

    def step(x):
        h = model(x)
        Seen.references.append(weakref.ref(h))
        if len(x) > 2:
            raise torch.OutOfMemoryError(OOM) from ValueError("a chain")
        return h.mean()

    with oom_guard() as guard:
        guard.run(step, torch.ones(8, 4))

    assert alive == [[False], [False, False]]


def test_an_error_that_someone_keeps_holds_nothing_of_the_attempt():
    class Kept:
        errors: list[BaseException] = []  # noqa: RUF012 - on a class: not the step's state
        references: list[weakref.ref[torch.Tensor]] = []  # noqa: RUF012

    def forward(x):
        h = x * 2
        Kept.references.append(weakref.ref(h))
        if len(x) > 2:
            raise torch.OutOfMemoryError(OOM)
        return h.mean()

    def step(x):
        try:
            return forward(x)
        except torch.OutOfMemoryError as error:
            Kept.errors.append(error)
            raise

    with oom_guard() as guard:
        guard.run(step, torch.ones(4))

    assert len(Kept.errors) == 1
    assert [reference() for reference in Kept.references] == [None] * 3


class Leaks:
    """What every failed attempt leaves behind, on a class where no guard finds it."""

    kept: list[torch.Tensor] = []  # noqa: RUF012
    now = True

    @classmethod
    def step(cls, x):
        h = x * 2
        if cls.now:
            cls.kept.append(h)
        if len(x) > 1:
            raise torch.OutOfMemoryError(OOM)
        return h

    @classmethod
    def step_that_leaks_whole_batches(cls, x):
        if len(x) < 8:
            return x * 2
        return cls.step(x)


@pytest.fixture
def leaks(monkeypatch):
    monkeypatch.setattr(Leaks, "kept", [])
    monkeypatch.setattr(Leaks, "now", True)
    return Leaks


def test_where_every_attempt_leaves_memory_behind_the_error_says_how_much(leaks):
    with simulate_oom("1MiB"), oom_guard() as guard, pytest.raises(SplitError) as caught:
        guard.run(leaks.step, torch.ones(16, 256))

    assert [event.new_size for event in guard.report.events] == [8, 4, 2]
    assert "every attempt leaves some behind" in str(caught.value)
    # The first attempt pays for no look at the memory, but its 16 KiB and the 16 KiB of the batch are held.
    assert "8.00 KiB, 4.00 KiB, 2.00 KiB in the last 3, so that 46.00 KiB are held now" in str(caught.value)


@pytest.mark.parametrize("leaking_calls", [3, 4])
def test_attempts_that_leave_memory_behind_are_counted_from_call_to_call(leaks, leaking_calls):
    with simulate_oom("1MiB"), oom_guard(grow_after=1) as guard:
        for _ in range(leaking_calls - 1):
            guard.run(leaks.step_that_leaks_whole_batches, torch.ones(8, 256))
        with pytest.raises(SplitError, match="every attempt") if leaking_calls > 3 else contextlib.nullcontext():
            guard.run(leaks.step_that_leaks_whole_batches, torch.ones(8, 256))


def test_memory_that_stays_once_in_a_while_stops_nothing(leaks):
    with simulate_oom("1MiB"), oom_guard(grow_after=1) as guard:
        for i in range(12):
            leaks.now = i % 3 < 2  # a library's workspace
            guard.run(leaks.step_that_leaks_whole_batches, torch.ones(8, 256))

    assert guard.report.ooms == 12


def test_the_device_is_asked_what_is_held_only_where_memory_has_just_run_out(log, mocker):
    asked = mocker.spy(_Host, "allocated_bytes")
    step = Recorder(8)
    with oom_guard() as guard:
        guard.run(step, torch.ones(8))
        assert asked.call_count == 0
        guard.run(step, torch.ones(16))
        for _ in range(20):
            guard.run(step, torch.ones(8))

    assert log.count(16) == 1
    assert 7 < asked.call_count < 12


def test_a_refusal_is_an_oom_for_those_who_catch_one():
    run, batch = catalogue.closure(), batches(1, 8)[0]

    with (
        simulate_oom(fail_at=5),
        oom_guard() as guard,
        pytest.raises(torch.OutOfMemoryError, match="can't run in pieces") as caught,
    ):
        guard.run(run.step, *batch)

    assert isinstance(caught.value, SplitError)
    assert caught.value.__context__ is None
