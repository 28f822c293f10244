"""What is known to be hard: an OOM in the middle of anything ends exact, as before, or with an error that names it."""

import collections
import contextlib
import copy
import gc
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import training as catalogue
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from training import CLASSES, FEATURES, Training, assert_same, batches, snapshot

from oomguard import BatchLimitError, current_guard, oom_guard
from oomguard.errors import InputError, OOMGuardError, RestoreError, SplitError
from oomguard.recovery import Entry
from oomguard.step.state import RandomState
from oomguard.testing import simulate_oom

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."
ITEMS, CALLS = 8, 3
BATCH = batches(1, ITEMS)[0]
EXACT, AS_BEFORE, CHANGED, OUTSIDE = "exact", "as before", "changed", "changed, outside optimizer.step"


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="oomguard")


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Every OOM ends in a garbage collection, which need not look at all that was imported."""
    catalogue.update_inside_backward()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def linear():
    torch.manual_seed(1)
    return nn.Linear(FEATURES, CLASSES).double()


def trained(make, calls=CALLS):
    run = make()
    for i, (x, y) in enumerate(batches(calls, ITEMS)):
        run.step(x, y)
        run.after(i)
    return run


class Updates:
    """How many optimizers are inside their `step`, on a class since a guard would put a variable back."""

    now = 0

    @classmethod
    def begins(cls, *_):
        cls.now += 1

    @classmethod
    def ends(cls, *_):
        cls.now -= 1

    @classmethod
    def watch(cls, run):
        cls.now = 0
        for optimizer in (thing for thing in run.state.values() if isinstance(thing, torch.optim.Optimizer)):
            optimizer.register_step_pre_hook(cls.begins)
            optimizer.register_step_post_hook(cls.ends)


def outcome(make, call, allocation, expected, **options):
    """Train with an OOM in one call; return the verdict, or None where the call has fewer allocations."""
    run, guard, verdict = make(), oom_guard(**options), EXACT
    Updates.watch(run)
    for i, (x, y) in enumerate(batches(CALLS, ITEMS)):
        before = snapshot(run)
        device = simulate_oom(fail_at=allocation if i == call else 10**9)
        try:
            with device, guard:
                guard.run(run.step, x, y)
        except RestoreError as error:
            assert error.changed  # noqa: PT017 - the loop goes on
            return CHANGED if Updates.now else OUTSIDE
        except OOMGuardError:
            assert_same(snapshot(run), before, rtol=0, atol=0)
            verdict = AS_BEFORE
            with guard:
                guard.run(run.step, x, y)
        if i == call and device.allocations < allocation:
            return None
        run.after(i)
    assert_same(snapshot(run), expected)
    return verdict


def outcomes(make, call, stride=1, **options):
    expected = snapshot(trained(make))
    found = (outcome(make, call, n, expected, **options) for n in itertools.count(1, stride))
    return list(itertools.takewhile(lambda verdict: verdict is not None, found))


# Steps of every kind

pytestmark = pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")


@pytest.mark.parametrize("make", [*catalogue.EXACT, *catalogue.REFUSED], ids=lambda make: make.__name__)
def test_a_step_of_any_kind_is_exact_or_as_before_or_says_what_has_changed(make):
    """Retained graphs, double backward, updates inside backward, writes through `.data`, averages, queues, and more."""
    splits = make in catalogue.EXACT
    # Updates by hand can't be told from other writes, and what follows the last update needs little memory.
    outside = make in (
        catalogue.update_by_hand,
        catalogue.gradient_by_function,
        catalogue.gradient_by_functional_transform,
        catalogue.gradients_without_a_check,
        catalogue.averaged_model,
        catalogue.evaluation_after_update,
    )

    assert set(outcomes(make, 0, 5)) == {EXACT if splits else AS_BEFORE}
    found = set(outcomes(make, 1, 2 if outside else 5))
    assert found - {CHANGED, OUTSIDE} == {EXACT if splits else AS_BEFORE}
    assert (OUTSIDE in found) == outside


@pytest.mark.parametrize("make", [catalogue.sam_through_data, catalogue.update_by_hand, catalogue.averaged_model])
def test_with_a_snapshot_nothing_stays_changed(make):
    assert {CHANGED, OUTSIDE}.isdisjoint(outcomes(make, 1, 3, snapshot=True))


# What a step keeps between calls


class Keeping(nn.Module):
    """A layer that keeps something from one call to the next."""

    def __init__(self, kept):
        super().__init__()
        self.layer, self.kept = linear(), kept

    def read(self):
        return self.kept if isinstance(self.kept, torch.Tensor) else 0.0

    def forward(self, x):
        h = self.layer(x) + 0.1 * self.read()
        self.keep(h.detach())
        return h


class Counter(Keeping):
    def keep(self, h):
        self.kept += 1

    def read(self):
        return 0.1 * self.kept


class Hidden(Keeping):
    def keep(self, h):
        self.kept = h.mean(0)


class HiddenPair(Keeping):
    def keep(self, h):
        self.kept = (h.mean(0), h.mean(0))

    def read(self):
        return 0.0 if self.kept is None else self.kept[1]


class Centre(Keeping):
    def __init__(self, kept):
        super().__init__(None)
        del self.kept
        self.register_buffer("kept", kept)

    def keep(self, h):
        self.kept = 0.9 * self.kept + 0.1 * h.mean(0)


class Queue(Keeping):
    def keep(self, h):
        self.kept.append(h.mean(0))

    def read(self):
        return sum(self.kept)


KEEPING = {
    "counter": (lambda: Counter(0), "kept"),
    "hidden state, none at first": (lambda: Hidden(None), "kept"),
    "hidden state": (lambda: Hidden(torch.zeros(CLASSES, dtype=torch.float64)), "kept"),
    "pair of hidden states": (lambda: HiddenPair(None), "kept"),
    "centre in a buffer": (lambda: Centre(torch.zeros(CLASSES, dtype=torch.float64)), "kept"),
    "queue": (lambda: Queue(collections.deque(maxlen=4)), "kept"),
}


def over(model):
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    def kept():
        return list(model.kept) if isinstance(model.kept, collections.deque) else model.kept

    return Training(step, {"model": model, "opt": opt, **({"kept": kept} if hasattr(model, "kept") else {})})


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("kind", KEEPING)
def test_what_a_module_keeps_between_calls_comes_back_and_is_refused_in_pieces(kind, call):
    make, name = KEEPING[kind]

    assert set(outcomes(lambda: over(make()), call)) == {AS_BEFORE}

    run, batch = over(make()), batches(1, ITEMS)[0]
    with oom_guard() as guard, simulate_oom(fail_at=1), pytest.raises(SplitError, match=rf"model\.{name}"):
        guard.run(run.step, *batch)


class Map(Keeping):
    """Keeps its output for someone to look at, as attention maps are kept."""

    def keep(self, h):
        self.kept = h

    def read(self):
        return 0.0


class Table(Keeping):
    """Makes a table when it is first needed, as rotary embeddings are made."""

    def keep(self, h):
        pass

    def read(self):
        if self.kept is None:
            self.kept = torch.linspace(0, 1, CLASSES, dtype=torch.float64)
        return self.kept


@pytest.mark.parametrize("kind", [Map, Table])
def test_what_no_later_piece_depends_on_may_be_kept(kind):
    def make():
        run = over(kind(None))
        run.state.pop("kept")  # a map is that of the last piece
        return run

    assert set(outcomes(make, 0)) == set(outcomes(make, 1)) == {EXACT}


def test_state_behind_a_librarys_object_comes_back_when_it_is_given():
    hidden = catalogue.adam()
    box = contextlib.nullcontext(hidden)  # an object that is not searched
    (x, y), (x2, y2) = batches(2, ITEMS)
    expected = catalogue.adam()
    for batch in ((x, y), (x2, y2)):
        expected.step(*batch)

    def step(x, y):
        return box.enter_result.step(x, y)

    with oom_guard(state=[hidden.state["model"], hidden.state["opt"]]) as guard:
        guard.run(step, x, y)
        with simulate_oom(fail_at=9):
            guard.run(step, x2, y2)

    assert_same(snapshot(hidden), snapshot(expected))


# Optimizers and scalers


class Rebinding(torch.optim.Optimizer):
    """Counts in a plain number, and binds a new tensor instead of writing the old one."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state["history"] = [*state.get("history", []), state["step"]]
            state["average"] = 0.9 * state.get("average", 0) + p.grad
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(0.1 * self.state[p]["average"] / self.state[p]["step"])


def test_numbers_and_tensors_that_an_optimizer_binds_anew_come_back():
    found = outcomes(lambda: catalogue.plain(Rebinding), 1)

    assert found[:-8] == [EXACT] * (len(found) - 8)  # until the first parameter has moved
    assert set(outcomes(lambda: catalogue.plain(Rebinding), 0)) == {EXACT}


def test_what_only_some_parameters_bind_anew_comes_back():
    def make():
        run = catalogue.plain(Rebinding)
        last = run.state["model"].last

        def freeze(_):
            last.requires_grad_(False)
            last.weight.grad = last.bias.grad = None

        return Training(run.step, run.state, freeze)

    assert EXACT in outcomes(make, 2)[-8:]  # inside the update


def test_what_a_call_writes_before_its_first_backward_is_undone():
    def make():
        run = catalogue.sgd_momentum()

        def step(x, y):
            with torch.no_grad():
                for p in run.state["model"].parameters():
                    p.clamp_(-0.3, 0.3)
            return run.step(x, y)

        return Training(step, run.state)

    assert set(outcomes(make, 1)) == {AS_BEFORE}


@pytest.mark.parametrize("name", catalogue.OPTIMIZERS)
def test_an_optimizer_of_pytorchs_writes_its_state_in_place(name):
    """The guard looks only at a part of what these bind; SparseAdam and LBFGS are looked at closely."""
    run = catalogue.plain(catalogue.OPTIMIZERS[name])
    found = []
    for x, y in batches(3, ITEMS):
        run.step(x, y)
        found.append([value for table in run.state["opt"].state.values() for value in table.values()])

    assert list(map(id, found[1])) == list(map(id, found[0]))
    assert list(map(id, found[2])) == list(map(id, found[0]))


def test_state_that_was_moved_by_hand_is_looked_up_again():
    run = trained(catalogue.adam, 1)
    (x, y), opt = batches(1, ITEMS)[0], run.state["opt"]

    with oom_guard(snapshot=True, update="each") as guard:
        guard.run(run.step, x, y)
        for state in opt.state.values():
            state.update({name: value.clone() for name, value in state.items()})  # as if to another device
        kept = [value for state in opt.state.values() for value in state.values()]
        with simulate_oom(fail_at=25):
            guard.run(run.step, x, y)

    assert list(map(id, kept)) == [id(value) for state in opt.state.values() for value in state.values()]


def test_an_update_that_follows_the_first_of_another_optimizer_is_not_taken_for_undone():
    """The second optimizer's first update keeps a copy; by then the first one has moved its parameters."""

    def make():
        run = catalogue.two_optimizers()
        first, last, model = run.state["first"], run.state["last"], run.state["model"]
        calls = [0]

        def step(x, y):
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            first.step()
            if calls[0]:
                last.step()
            return loss.detach()

        def after(_):
            calls[0] += 1
            first.zero_grad()
            last.zero_grad()

        return Training(step, run.state, after)

    found = outcomes(make, 1)

    assert set(found) == {EXACT, CHANGED}
    assert found == [EXACT] * found.count(EXACT) + [CHANGED] * found.count(CHANGED)


def accumulated_and_unscaled():
    """Gradients are made in the loop; the guarded call scales them back in place, clips them and updates."""
    model = linear()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def make_gradients(_=None):
        x, y = batches(1, ITEMS)[0]
        scaler.scale(functional.cross_entropy(model(x), y)).backward()

    def step(x, y):
        scaler.unscale_(opt)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()

    def after(_):
        opt.zero_grad()
        make_gradients()

    make_gradients()
    return Training(step, {"model": model, "opt": opt, "scaler": scaler}, after)


def test_gradients_that_a_scaler_has_unscaled_in_place_are_named_or_come_back():
    assert OUTSIDE in outcomes(accumulated_and_unscaled, 1)
    assert set(outcomes(accumulated_and_unscaled, 0)) == {EXACT}
    assert set(outcomes(accumulated_and_unscaled, 1, snapshot=True)) == {EXACT}


@pytest.mark.parametrize(
    "change",
    [
        lambda opt: opt.load_state_dict(opt.state_dict()),
        lambda opt: opt.add_param_group({"params": [torch.zeros(2, requires_grad=True)]}),
    ],
    ids=["a checkpoint is loaded", "a group is added"],
)
def test_groups_that_are_new_are_looked_up_again(change):
    """A schedule writes them."""
    run = catalogue.sgd_momentum()
    opt = run.state["opt"]

    def step(x, y):
        run.step(x, y)
        opt.param_groups[-1]["lr"] *= 0.5
        if len(x) > 4:
            raise torch.OutOfMemoryError(OOM)

    with oom_guard(update="each") as guard:
        guard.run(step, *(tensor[:4] for tensor in BATCH))
        change(opt)
        opt.param_groups[-1]["lr"] = 0.8
        guard.run(step, *BATCH)

    assert opt.param_groups[-1]["lr"] == 0.2  # two pieces


@pytest.mark.parametrize(
    "forget",
    [lambda opt: opt.state.clear(), lambda opt: setattr(opt, "state", collections.defaultdict(dict))],
    ids=["emptied", "replaced"],
)
def test_an_update_that_creates_its_state_once_more_is_undone(forget):
    def make():
        run = catalogue.adam()
        return Training(run.step, run.state, lambda _: forget(run.state["opt"]))

    assert set(outcomes(make, 1)) == {EXACT}


def test_a_fused_update_that_was_under_way_is_named(monkeypatch):
    run = catalogue.plain(lambda p: torch.optim.Adam([{"params": [each]} for each in p], fused=True))
    real, left = torch._fused_adam_, [2]

    def fails(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError(OOM)
        return real(*args, **kwargs)

    with oom_guard() as guard:
        guard.run(run.step, *BATCH)
        monkeypatch.setattr(torch, "_fused_adam_", fails)
        with pytest.raises(RestoreError, match="the update of Adam"):
            guard.run(run.step, *BATCH)


class ThroughData(torch.optim.Optimizer):
    """Writes where no `_version` shows it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adam, lambda p: torch.optim.Adam(p, fused=True), ThroughData], ids=["", "fused", "data"]
)
def test_an_update_that_is_not_the_last_of_a_call_is_undone(optimizer):
    def make():
        first, second = catalogue.plain(optimizer), catalogue.sgd_momentum()
        state = {f"{n} {name}": t for n, run in enumerate((first, second)) for name, t in run.state.items()}
        return Training(lambda x, y: first.step(x, y) + second.step(x, y), state)

    assert set(outcomes(make, 1)) - {OUTSIDE} == {AS_BEFORE}
    assert outcomes(make, 1).count(OUTSIDE) == 1  # the sum of the losses


@pytest.mark.parametrize("through_data", [False, True])
def test_what_is_written_before_an_update_that_is_not_the_last_is_undone_too(through_data):
    def make():
        first, second = catalogue.sgd_momentum(), catalogue.sgd_momentum()
        state = {f"{n} {name}": t for n, run in enumerate((first, second)) for name, t in run.state.items()}
        model, opt = first.state["model"], first.state["opt"]

        def step(x, y):
            opt.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    (p.data if through_data else p).clamp_(-0.3, 0.3)
            opt.step()
            return second.step(x, y)

        return Training(step, state)

    assert set(outcomes(make, 1)) == {AS_BEFORE}


@pytest.mark.parametrize("make", [catalogue.sam, catalogue.sam_through_data])
def test_what_a_call_writes_early_is_still_known_when_its_state_is_looked_up_again(make):
    run, (x, y) = make(), BATCH
    opt = next(thing for thing in run.state.values() if isinstance(thing, torch.optim.Optimizer))
    device, guard = simulate_oom("1GiB"), oom_guard()
    with guard, device:
        guard.run(run.step, x, y)
    opt.load_state_dict(opt.state_dict())
    before = snapshot(run)
    with guard, simulate_oom(fail_at=device.allocations - 3), pytest.raises(SplitError):
        guard.run(run.step, x, y)

    assert_same(snapshot(run), before, rtol=0, atol=0)


# Where it runs out, and where it is cut short


@pytest.mark.parametrize("snapshot_kept", [False, True])
@pytest.mark.parametrize("call", [0, 1])
def test_memory_runs_out_when_the_loss_is_read_after_the_update(call, snapshot_kept):
    def make():
        run = catalogue.sgd_momentum()

        def step(x, y):
            return (run.step(x, y) * 1).item()  # a number on its way to the host

        return Training(step, run.state)

    found = outcomes(make, call, snapshot=snapshot_kept)

    assert found[:-1] == [EXACT] * (len(found) - 1)
    assert found[-1] == (OUTSIDE if call and not snapshot_kept else EXACT)


@pytest.mark.parametrize(
    "make", [catalogue.averaged_model, catalogue.evaluation_after_update, catalogue.update_by_hand]
)
def test_a_guard_that_met_an_oom_behind_an_update_can_undo_it_the_next_time(make):
    run, guard, memory = make(), oom_guard(update="each"), simulate_oom("1GiB")
    with guard, memory:
        for x, y in batches(2, ITEMS):
            counted = memory.allocations
            guard.run(run.step, x, y)
        last = memory.allocations - counted
    (x, y), *_ = batches(1, ITEMS)
    with guard, simulate_oom(fail_at=last), pytest.raises(RestoreError):
        guard.run(run.step, x, y)
    expected = make()
    for name, thing in expected.state.items():
        thing.load_state_dict(copy.deepcopy(run.state[name].state_dict()))
    with guard, simulate_oom(fail_at=last) as device:
        guard.run(run.step, x, y)

    for piece in zip(x.split(4), y.split(4), strict=True):
        expected.step(*piece)
    assert device.allocations > last
    assert_same(snapshot(run), snapshot(expected))


def failing(times, error):
    """Return what fails so many times and then does what *real* does."""
    left = [times]

    def wrap(real):
        def call(*args, **kwargs):
            if left[0]:
                left[0] -= 1
                raise error
            return real(*args, **kwargs)

        return call

    return wrap


PLACES = {
    "while the exception is let go": ("oomguard.recovery.let_go",),
    "before anything is put back": (Entry, "restore"),
    "when half is put back": (RandomState, "restore"),
    "while the cache is emptied": ("oomguard.recovery._free",),
    "while the batch is cut": ("oomguard.recovery.even_sizes",),
    "while the results are joined": ("oomguard.recovery.join_results",),
}


def fail_at(patch, place, times, error):
    target = PLACES[place]
    if len(target) == 1:
        module, name = target[0].rsplit(".", 1)
        owner = __import__(module, fromlist=[name])
    else:
        owner, name = target
    patch.setattr(owner, name, failing(times, error)(vars(owner)[name]))


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_in_the_middle_of_recovery_leaves_everything_as_before(place, monkeypatch):
    run, expected = catalogue.adam(), trained(catalogue.adam, 2)
    (x, y), (x2, y2) = batches(2, ITEMS)
    run.step(x, y)
    before, random = snapshot(run), torch.get_rng_state()

    with oom_guard() as guard:
        with monkeypatch.context() as patch:
            fail_at(patch, place, 1, KeyboardInterrupt())
            with simulate_oom(fail_at=9), pytest.raises(KeyboardInterrupt):
                guard.run(run.step, x2, y2)
        assert current_guard() is guard
        assert_same(snapshot(run), before, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), random)
        guard.run(run.step, x2, y2)

    assert current_guard() is None
    assert_same(snapshot(run), snapshot(expected))


@pytest.mark.parametrize("place", [place for place in PLACES if "put back" in place or "joined" in place])
def test_memory_that_runs_out_during_recovery_is_met_by_emptying_the_cache(place, monkeypatch):
    run, expected = catalogue.adam(), trained(catalogue.adam, 2)
    (x, y), (x2, y2) = batches(2, ITEMS)
    run.step(x, y)

    with oom_guard() as guard, simulate_oom(fail_at=9):
        fail_at(monkeypatch, place, 1, torch.OutOfMemoryError(OOM))
        guard.run(run.step, x2, y2)

    assert guard.limit == ITEMS // 2  # no smaller pieces for that
    assert_same(snapshot(run), snapshot(expected))


def test_memory_that_runs_out_when_pieces_of_their_own_are_joined_is_met_by_emptying_the_cache(monkeypatch):
    fail_at(monkeypatch, "while the results are joined", 1, torch.OutOfMemoryError(OOM))
    x = torch.arange(4.0)

    with oom_guard(update="each") as guard, simulate_oom(fail_at=1):
        result = guard.run(lambda x: x * 2, x)

    assert result.tolist() == [0, 2, 4, 6]


def test_where_there_is_no_room_to_put_back_the_error_says_so(monkeypatch):
    run = trained(catalogue.adam, 1)
    fail_at(monkeypatch, "when half is put back", 2, torch.OutOfMemoryError(OOM))

    with oom_guard() as guard, simulate_oom(fail_at=9), pytest.raises(RestoreError, match="while it was") as caught:
        guard.run(run.step, *BATCH)

    assert "model.first.weight" in caught.value.changed
    assert "last checkpoint" in str(caught.value)


def test_an_error_after_the_update_of_the_last_piece_says_what_has_changed():
    run = catalogue.adam()
    (x, y), *_ = batches(1, ITEMS)

    class Bad:
        now = False

    def step(x, y):
        loss = run.step(x, y)
        if Bad.now and any(p.grad is not None for p in run.state["model"].parameters()):
            raise ValueError("after the update")
        return loss

    with oom_guard() as guard:
        with simulate_oom(fail_at=9):
            guard.run(step, x, y)
        Bad.now = True
        with pytest.raises(ValueError, match="after the update") as caught:
            guard.run(step, x, y)

    assert "model.first.weight" in caught.value.__notes__[0]
    assert "can't be put back" in caught.value.__notes__[0]


def test_results_that_can_not_be_joined_leave_everything_as_before():
    run = trained(catalogue.adam, 1)
    before = snapshot(run)

    def step(x, y):
        run.step(x, y)
        return object()

    with oom_guard() as guard, simulate_oom(fail_at=9), pytest.raises(InputError):
        guard.run(step, *BATCH)

    assert_same(snapshot(run), before, rtol=0, atol=0)


def test_pieces_that_have_run_on_their_own_are_not_lost_silently(monkeypatch):
    run = catalogue.sgd_momentum()
    fail_at(monkeypatch, "while the results are joined", 2, torch.OutOfMemoryError(OOM))

    with (
        oom_guard(update="each") as guard,
        simulate_oom(fail_at=9),
        pytest.raises(RestoreError, match=r"all of the batch has run in plain.* Go on with the next batch"),
    ):
        guard.run(run.step, *BATCH)


def test_where_some_pieces_have_run_on_their_own_the_limit_says_so():
    def step(x):
        if 5 in x:
            raise torch.OutOfMemoryError(OOM)

    with (
        oom_guard(update="each") as guard,
        pytest.raises(BatchLimitError, match="5 items had run by then, in updates of their own, which stay"),
    ):
        guard.run(step, torch.arange(ITEMS))


# Exceptions


@pytest.mark.parametrize(
    "wrap", [lambda error: ExceptionGroup("of a task group", [error]), lambda error: error], ids=["grouped", "chained"]
)
def test_grouped_and_chained_errors_are_met(wrap):
    run, expected = catalogue.adam(), trained(catalogue.adam, 1)

    def step(x, y):
        try:
            return run.step(x, y)
        except torch.OutOfMemoryError as error:
            raise wrap(error) from ValueError("a cause")

    with oom_guard() as guard, simulate_oom(fail_at=9):
        guard.run(step, *BATCH)

    assert guard.report.ooms == 1
    assert_same(snapshot(run), snapshot(expected))


@pytest.mark.parametrize("make", [catalogue.queue, catalogue.gradient_hook, catalogue.gan], ids=lambda m: m.__name__)
@pytest.mark.parametrize("error", [RuntimeError("this batch is left out"), None], ids=["wraps", "swallows"])
def test_a_step_that_catches_what_pieces_refuse_is_refused_all_the_same(make, error):
    run = make()
    before, batch = snapshot(run), batches(1, ITEMS)[0]

    def step(x, y):
        if len(x) == ITEMS:
            raise torch.OutOfMemoryError(OOM)
        try:
            return run.step(x, y)
        except RuntimeError as caught:
            if error is not None:
                raise error from caught
            return None

    with oom_guard() as guard, pytest.raises(SplitError, match=catalogue.REFUSED[make]):
        guard.run(step, *batch)

    assert_same(snapshot(run), before, rtol=0, atol=0)


# Threads


def in_threads(work):
    """Run the halves of a batch in threads of their own, as DataParallel runs its replicas."""

    def step(x, y):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, x.chunk(2), y.chunk(2)))

    return step


def runs_out_above(items, work):
    def call(x, y):
        if len(x) > items:
            raise torch.OutOfMemoryError(OOM)
        return work(x, y)

    return call


def test_an_error_of_a_replica_in_a_thread_is_met():
    run, expected = catalogue.adam(), trained(catalogue.adam, 1)
    model, opt = run.state["model"], run.state["opt"]
    replicas = in_threads(runs_out_above(2, lambda x, y: functional.cross_entropy(model(x), y)))

    def step(x, y):
        opt.zero_grad()
        loss = torch.stack(replicas(x, y)).mean()
        loss.backward()
        opt.step()
        return loss.detach()

    with oom_guard() as guard:
        guard.run(step, *BATCH)

    assert guard.limit == 4
    assert_same(snapshot(run), snapshot(expected))


def test_a_backward_in_a_thread_can_not_be_held_back():
    run = catalogue.adam()
    model, opt = run.state["model"], run.state["opt"]
    before = snapshot(run)
    replicas = in_threads(runs_out_above(2, lambda x, y: (functional.cross_entropy(model(x), y) / 2).backward()))

    def step(x, y):
        opt.zero_grad()
        replicas(x, y)
        opt.step()

    with oom_guard() as guard, pytest.raises(SplitError, match="gradients"):
        guard.run(step, *BATCH)

    assert_same(snapshot(run), before, rtol=0, atol=0)


# Compilers, functional transforms, inference


def compiled(what, backend):
    """A training whose model, loss or whole step is compiled."""
    run = catalogue.plain(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    model, opt = run.state["model"], run.state["opt"]
    forward = torch.compile(model, backend=backend) if what == "model" else model

    def loss_of(x, y):
        return functional.cross_entropy(forward(x), y)

    if what == "loss":
        loss_of = torch.compile(loss_of, backend=backend)

    def step(x, y):
        opt.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        opt.step()
        return loss.detach()

    return Training(torch.compile(step, backend=backend) if what == "step" else step, run.state)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["model", "loss", "step"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
def test_compiled_models_and_steps_are_exact(what, backend):
    torch._dynamo.reset()
    counters.clear()
    expected, run = trained(catalogue.sgd_momentum), compiled(what, backend)
    step = runs_out_above(4, run.step)

    with oom_guard() as guard:
        for x, y in batches(CALLS, ITEMS):
            guard.run(step, x, y)

    assert guard.limit == 4
    # The pieces after the first call, which is looked at, were compiled, and nothing of the guard with them.
    assert 0 < counters["stats"]["unique_graphs"] <= 4
    assert_same(snapshot(run), snapshot(expected))


def test_a_functional_call_is_exact():
    model = linear()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    opt = torch.optim.Adam(parameters.values(), 0.01)

    def step(x, y):
        opt.zero_grad()
        loss = functional.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)
        loss.backward()
        opt.step()
        return loss.detach()

    reference = linear()
    reference_opt = torch.optim.Adam(reference.parameters(), 0.01)
    for x, y in batches(2, ITEMS):
        with oom_guard() as guard, simulate_oom(fail_at=5):
            guard.run(step, x, y)
        reference_opt.zero_grad()
        functional.cross_entropy(reference(x), y).backward()
        reference_opt.step()

    assert_same({k: p.detach() for k, p in parameters.items()}, dict(reference.state_dict()))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_outputs_of_pieces_without_gradients_are_concatenated(mode):
    model = catalogue.adam().state["model"].eval()
    (x, y), *_ = batches(1, 13)
    with torch.no_grad():
        expected = model(x)

    @mode()
    def evaluate(x, y):
        out = model(x)
        return {"out": out, "right": int((out.argmax(1) == y).sum()), "loss": functional.cross_entropy(out, y)}

    for allocation in range(1, 7):
        with oom_guard() as guard, simulate_oom(fail_at=allocation):
            result = guard.run(evaluate, x, y)
        assert guard.limit == 7
        torch.testing.assert_close(result["out"], expected)
        assert result["right"] == int((expected.argmax(1) == y).sum())
        torch.testing.assert_close(result["loss"], functional.cross_entropy(expected, y))
