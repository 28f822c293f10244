"""What went wrong elsewhere, and must not here. Each test names the report that taught its rule."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed
import training as catalogue
from torch import nn
from torch._utils import ExceptionWrapper
from training import assert_same, batches, snapshot

from oomguard import BatchLimitError, Input, find_batch_size, fit_batch, oom_guard
from oomguard.errors import OOMGuardError, RankError, SplitError
from oomguard.memory.device import memory_of
from oomguard.step.attempt import Entry
from oomguard.testing import simulate_oom

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."
KIB, MIB = 2**10, 2**20
INPUTS = {"x": Input(catalogue.FEATURES, dtype=torch.float64), "y": Input(dtype=torch.long, high=catalogue.CLASSES)}


class RunsOutInBackward(torch.autograd.Function):
    """Asks for more than there is on the way back, above a number of items."""

    @staticmethod
    def forward(ctx, h, items):
        ctx.items = items
        ctx.save_for_backward(h.clone())
        return h * 2

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.items:
            torch.empty(2**50)
        return gradient * 2, None


# What a failed attempt leaves behind


def test_a_backward_that_runs_out_leaves_the_floor_where_it_was():
    """PyTorch #82218, #38966."""
    model = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    floors = []
    note = floors.append

    with simulate_oom("1GiB") as device:

        def step(x):
            model.zero_grad()
            note(device.live_bytes)
            loss = RunsOutInBackward.apply(torch.tanh(model(x)), 4).square().mean()
            loss.backward()

        for _ in range(6):
            model.zero_grad()
            guard = oom_guard()
            guard.run(step, x)
            assert guard.report.ooms == 1

    attempts = [floors[start : start + 3] for start in range(0, len(floors), 3)]
    assert len(attempts) == 6
    assert {(whole, first) for whole, first, _ in attempts} == {(0, 0)}
    assert len({last for *_, last in attempts}) == 1  # the gradient of the first piece, and nothing else


def fails_at_any_size(note, x):
    def step(x):
        h = x * 2
        note(weakref.ref(h))
        raise torch.OutOfMemoryError(OOM)

    oom_guard().run(step, x)


def can_not_be_cut(note, x):
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight])

    def step(x):
        def closure():
            h = weight * x
            note(weakref.ref(h))
            if len(x) > 4:
                raise torch.OutOfMemoryError(OOM)
            h.mean().backward()
            return h.mean()

        optimizer.step(closure)

    oom_guard().run(step, x)


def fits_nowhere(note, x):
    @fit_batch(inputs={"x": Input(4)}, capacity="1GiB")
    def step(x):
        h = x * 2
        note(weakref.ref(x))
        note(weakref.ref(h))
        raise torch.OutOfMemoryError(OOM)

    step.probe()


@pytest.mark.parametrize(
    ("use", "kind"),
    [(fails_at_any_size, BatchLimitError), (can_not_be_cut, SplitError), (fits_nowhere, BatchLimitError)],
)
def test_an_error_that_a_shell_keeps_holds_no_tensor_of_an_attempt(use, kind):
    """PyTorch #36874, IPython #11572: a shell keeps the last error, and with it every frame that it passed."""
    kept, references = None, []
    try:  # `pytest.raises` would clear the frames
        use(references.append, torch.ones(8, 4))
    except OOMGuardError as error:
        kept = error

    assert type(kept) is kind
    assert kept.__cause__ is None
    assert kept.__context__ is None
    assert references
    assert [reference() for reference in references] == [None] * len(references)


# What must come back


@pytest.mark.parametrize("failing", [0, 1])
def test_gradients_unscaled_in_the_step_are_unscaled_once_though_the_loop_updates(failing):
    """Composer #1999, transformers #23905: unscale_() has already been called since the last update()."""

    def train(allocation):
        torch.manual_seed(0)
        model = nn.Linear(catalogue.FEATURES, catalogue.CLASSES).double()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss.detach()

        with oom_guard() as guard:
            for number, (x, y) in enumerate(batches(3, 8)):
                with simulate_oom("1GiB", fail_at=allocation if number == failing else None):
                    guard.run(step, x, y)
                scaler.step(optimizer)
                scaler.update()
        run = catalogue.Training(step, {"model": model, "optimizer": optimizer, "scaler": scaler})
        return snapshot(run), guard.report.ooms

    expected, ooms = train(None)
    assert ooms == 0
    for allocation in range(2, 25, 3):  # of which some come before the backward, and some after unscale_
        state, ooms = train(allocation)
        assert ooms == 1, allocation
        assert_same(state, expected)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 8])
def test_optimizer_state_that_was_half_made_is_made_anew(mocker, foreach, call):
    """YOLOv3 #80 and others: KeyError: 'exp_avg' in the step after the one that ran out."""
    expected, run = (catalogue.plain(lambda p: torch.optim.Adam(p, 0.01, foreach=foreach)) for _ in range(2))
    (x, y), (x2, y2) = batches(2, 8)
    for batch in ((x, y), (x2, y2)):
        expected.step(*batch)
    zeros_like, calls = torch.zeros_like, itertools.count(1)

    def runs_out(*args, **kwargs):
        if next(calls) == call:
            raise torch.OutOfMemoryError(OOM)
        return zeros_like(*args, **kwargs)

    mocker.patch("torch.zeros_like", runs_out)
    with oom_guard() as guard:
        guard.run(run.step, x, y)
        guard.run(run.step, x2, y2)

    assert guard.report.ooms == 1
    assert_same(snapshot(run), snapshot(expected))


@pytest.mark.filterwarnings("ignore:.*batch-norm statistics differ by nature:oomguard.errors.OOMGuardWarning")
def test_a_piece_of_one_item_is_avoided_where_it_can_be():
    """fastai #1352, nncf #379: Expected more than 1 value per channel when training."""
    norm = nn.BatchNorm1d(3)
    sizes = []
    note = sizes.append

    def step(x):
        note(len(x))
        h = norm(x)
        if len(x) > 4:
            raise torch.OutOfMemoryError(OOM)
        return h.mean()

    oom_guard().run(step, torch.randn(13, 3))

    assert sizes == [13, 7, 4, 3, 3, 3]  # and not 4, 4, 4, 1


def test_a_complaint_about_a_piece_of_one_item_is_no_oom_and_names_the_option():
    norm = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in norm.state_dict().items()}

    def step(x):
        h = norm(x)
        if len(x) > 1:
            raise torch.OutOfMemoryError(OOM)
        return h.mean()

    guard = oom_guard()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        guard.run(step, torch.randn(3, 3))

    assert "oom_guard(min_batch_size=2)" in caught.value.__notes__[0]
    assert_same(norm.state_dict(), before, rtol=0, atol=0)


# What a probe must see


def measured(optimizer):
    """A step over parameters of 256 KiB, the optimizer, and the report of its probe."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    opt = optimizer(model.parameters())

    @fit_batch(inputs={"x": Input(256)}, headroom=0.0, capacity="4MiB", search="bisect", multiple_of=16)
    def step(x):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()

    return opt, step.probe()


def test_the_probe_counts_the_optimizers_state_and_leaves_none():
    """PyTorch #9439: a batch found without the optimizer does not train; rf-detr #1342: nor may it count twice."""
    probes = [
        measured(optimizer)
        for optimizer in (
            lambda p: torch.optim.SGD(p, 0.1),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            lambda p: torch.optim.Adam(p, foreach=False),
        )
    ]

    first_peaks = [report.trials[0].peak_allocated_bytes for _, report in probes]
    assert 2 * 256 * KIB <= first_peaks[0] < first_peaks[1] < first_peaks[2]
    assert first_peaks[1] >= 3 * 256 * KIB  # parameters, gradients, momentum
    assert 4 * 256 * KIB <= first_peaks[2] < 8 * 256 * KIB  # two moments, and what the update needs for a moment
    assert probes[0][1].batch_size > probes[1][1].batch_size > probes[2][1].batch_size
    assert [len(opt.state) for opt, _ in probes] == [0] * 3


def test_the_peak_is_also_that_of_the_update():
    """PyTorch #97712: updates of all parameters at once need room for as many temporaries."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    peaks = []
    for foreach in (False, True):
        opt = torch.optim.Adam(model.parameters(), foreach=foreach)

        @fit_batch(inputs={"x": Input(64)}, capacity="1GiB", max_batch_size=2)
        def step(x, opt=opt):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()

        peaks.append(step.probe().trials[0].peak_allocated_bytes)

    assert peaks[1] > peaks[0] + 8 * 64 * 64 * 4  # a temporary for each of the 16, where one for all would do


def test_the_peak_is_also_that_of_a_first_call_that_tries_workspaces():
    """PyTorch #49207: the first call took 36 of 40 GB, later ones little."""
    tried = set()
    is_new, note = tried.isdisjoint, tried.add

    @fit_batch(inputs={"x": Input(4)}, capacity="1GiB", max_batch_size=4, search="double")
    def step(x):
        if is_new({len(x)}):
            note(len(x))
            torch.empty(MIB, dtype=torch.uint8)
        return x.mean()

    report = step.probe()

    assert [trial.steps for trial in report.trials] == [3, 3]
    assert all(trial.peak_allocated_bytes >= MIB for trial in report.trials)


@pytest.mark.parametrize(("search", "answer"), [("double", 8), ("bisect", 15)])
def test_a_size_that_runs_out_in_its_first_call_alone_is_too_large_as_training_makes_that_call_too(search, answer):
    """torchcv #159, YOLOv5 #9287."""
    tried, sizes = set(), []
    is_new, note, note_size = tried.isdisjoint, tried.add, sizes.append

    @fit_batch(inputs={"x": Input(4)}, capacity="1GiB", search=search)
    def step(x):
        note_size(len(x))
        if len(x) >= 16 and is_new({len(x)}):
            note(len(x))
            raise torch.OutOfMemoryError(OOM)
        return x.mean()

    assert step.batch_size == answer
    assert sizes.count(16) == 1
    assert sizes.count(answer) == 3


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_answer_trains_and_one_item_more_does_not(optimizer):
    """Lightning #8028, #20231: the size that was found ran out in training; torch-sim #596: the card was left full."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))

    def make():
        torch.manual_seed(0)
        opt = optimizer(model.parameters(), 0.01)

        @fit_batch(inputs={"x": Input(32)}, headroom=0.0)
        def step(x):
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return step

    def train(size):
        step = make()
        with simulate_oom("256KiB"):
            for _ in range(5):
                x = torch.randn(size, 32)
                loss = step(x)
        del x
        return loss

    step = make()
    with simulate_oom("256KiB") as device:
        answer = step.batch_size
        gc.collect()
        assert device.live_bytes == 0

    assert train(answer).isfinite()
    model.zero_grad()
    with pytest.raises(torch.OutOfMemoryError):
        train(answer + 1)
    model.zero_grad()


def test_memory_that_others_hold_is_in_no_budget(mocker):
    """vLLM #2863: the budget was that of an empty card."""
    module = mocker.Mock(**{"memory_reserved.return_value": 100})
    mocker.patch.object(torch, "get_device_module", return_value=module)

    budgets = []
    for free in (900, 300):
        module.mem_get_info.return_value = (free, 1000)
        budgets.append(memory_of(torch.device("cuda", 0)).budget_bytes(0.1))

    assert budgets == [900, 300]


# What a guard must keep apart


class Capacity:
    """How many items fit; on a class, which is not the step's state."""

    items = 99


def test_memory_that_others_take_after_the_probe_is_met_by_smaller_pieces(monkeypatch):
    """Ludwig #3958."""
    sizes = []
    note = sizes.append

    @fit_batch(inputs={"x": Input(4)}, capacity="1GiB", max_batch_size=8)
    def step(x):
        note(len(x))
        if len(x) > Capacity.items:
            raise torch.OutOfMemoryError(OOM)
        return x.mean()

    assert step.batch_size == 8
    sizes.clear()
    monkeypatch.setattr(Capacity, "items", 4)

    with oom_guard() as guard:
        for _ in range(2):
            step(torch.ones(8, 4))

    assert sizes == [8, 4, 4, 4, 4]
    assert (guard.limit, step.batch_size) == (4, 8)


def test_the_evaluation_has_a_limit_of_its_own():
    """Transformers #32215, #46809: an evaluation that ran out halved the training's batch."""
    sizes = []
    note = sizes.append

    def make(name, items):
        def step(x):
            note((name, len(x)))
            if len(x) > items:
                raise torch.OutOfMemoryError(OOM)
            return x.mean()

        step.__qualname__ = name
        return fit_batch(inputs={"x": Input(4)}, capacity="1GiB", search="bisect")(step)

    train, evaluate = make("train", 8), make("evaluate", 2)
    with oom_guard() as guard:
        for step in (train, evaluate, train, evaluate):
            step(torch.ones(8, 4))

    assert [size for name, size in sizes if name == "train"] == [8, 8]
    assert [size for name, size in sizes if name == "evaluate"] == [8, 4, *[2] * 8]
    assert guard.report.limits == {"evaluate": 2}
    assert (train.batch_size, evaluate.batch_size) == (8, 2)


def test_the_longest_batch_may_come_last():
    """Transformers #11388, TRL #1626, ParlAI #407: the longest sequences ran out in mid-training."""
    used, attempts = [], []
    use, note = used.append, attempts.append

    def step(x):
        note(x.shape)
        if x.numel() > 512:
            raise torch.OutOfMemoryError(OOM)
        use((x.shape[1], len(x)))

    with oom_guard() as guard:
        for length in [*range(1, 65), 32]:
            guard.run(step, torch.ones(16, length))

    items = {length: sum(n for seen, n in used if seen == length) for length, _ in used}
    assert items == dict.fromkeys(range(1, 65), 16) | {32: 32}
    assert guard.report.ooms == 1  # at the first length that is too long; all later ones are cut before they run out
    assert [tuple(shape) for shape in attempts if shape[1] == 32] == [(16, 32)] * 2


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(8, 3, dtype=torch.float64),
        torch.ones(8, 3, dtype=torch.bfloat16),
        torch.ones(8, 3, dtype=torch.uint8),
        torch.ones(8, 3, dtype=torch.bool),
        torch.ones(8, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(3, 8).t(),
        torch.ones(8, 3, requires_grad=True),
    ],
    ids=["float64", "bfloat16", "uint8", "bool", "channels last", "transposed", "with a gradient"],
)
def test_pieces_are_what_the_batch_is_but_for_their_size(x):
    """MMDetection #11463, #9616: what ran out went on in half precision, or on the CPU."""
    pieces = []
    note = pieces.append

    def step(x):
        note((x.dtype, x.device, x.stride(), x.requires_grad, torch.is_autocast_enabled("cpu")))
        if len(x) > 2:
            raise torch.OutOfMemoryError(OOM)
        return x

    result = oom_guard().run(step, x)

    assert len(pieces) == 6
    assert set(pieces) == {(x.dtype, x.device, x.stride(), x.requires_grad, False)}
    assert (result.dtype, result.device) == (x.dtype, x.device)
    assert torch.equal(result, x)


# What is none of its business


class OutOfResources(Exception):  # noqa: N818
    """Triton's: a kernel's tile does not fit on the chip, whatever the batch."""


def test_a_kernel_too_large_for_the_chip_is_raised_at_once():
    """Triton #8182, vLLM #12498: halving for it goes on to zero."""
    sizes = []
    note = sizes.append
    error = OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376.")

    @fit_batch(inputs={"x": Input(4)}, capacity="1GiB", search="double")
    def step(x):
        note(len(x))
        if len(x) >= 16:
            raise error
        return x.mean()

    with pytest.raises(OutOfResources) as probing:
        step.probe(steps_per_trial=1)
    with oom_guard(), pytest.raises(OutOfResources) as guarding:
        step(torch.ones(16, 4))

    assert probing.value is guarding.value is error
    assert sizes == [2, 4, 8, 16, 16]


@pytest.mark.parametrize("where", ["DataLoader worker process 0", "pin memory thread for device 0"])
def test_a_loader_that_runs_out_is_not_the_step(where):
    """hear-eval-kit #316, kraken #642: the loader's iterator is dead, and a step repeated for it counts twice."""
    sizes = []
    note = sizes.append

    def loader():
        yield from torch.ones(2, 2, 3)
        try:
            torch.empty(2**60)
        except RuntimeError:
            failed = ExceptionWrapper(where=f"in {where}")  # as a loader passes on what its process or thread has met
        failed.reraise()

    def step(x):
        note(len(x))
        return x.mean()

    def train():
        with oom_guard() as guard:
            for x in loader():
                guard.run(step, x)

    with pytest.raises(RuntimeError, match=where) as caught:
        train()

    assert sizes == [2, 2]
    assert "can't allocate memory" in str(caught.value)
    assert not hasattr(caught.value, "__notes__")  # no advice to decorate a step


@pytest.mark.parametrize("fitting", [pytest.param(8, id="in the whole batch"), pytest.param(4, id="in a piece")])
def test_the_error_that_lost_the_device_is_the_one_that_is_raised(mocker, fitting):
    """ds4 #759: a process went on for 22 hours with a context that was lost."""
    emptied = mocker.patch("oomguard.memory.device._Host.empty_cache")
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    sizes = []
    note = sizes.append

    def step(x):
        note(len(x))
        if len(x) > fitting:
            raise torch.OutOfMemoryError(OOM)
        mocker.patch.object(Entry, "restore", side_effect=RuntimeError("nothing can be copied any more"))
        raise error

    with pytest.raises(RuntimeError) as caught:
        oom_guard().run(step, torch.ones(8))

    assert caught.value is error
    assert sizes == ([8] if fitting == 8 else [8, 4])
    assert emptied.call_count == len(sizes) - 1  # for the one that ran out before


class LosesTheDevice(nn.Linear):
    """Writes its weight, and then its kernel reads where it may not."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.zero_()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def probe_of_a_step(model):
    fit_batch(inputs={"x": Input(4)}, capacity="1GiB")(lambda x: model(x).mean()).probe()


def plain_function(model):
    find_batch_size(model, "cpu", (4,), (1,), 100)


@pytest.mark.parametrize("use", [probe_of_a_step, plain_function])
def test_a_probe_that_loses_the_device_puts_nothing_back(mocker, use):
    """A copy to a lost device would raise in place of the error."""
    emptied = mocker.patch("oomguard.memory.device._Host.empty_cache")
    model = LosesTheDevice(4, 1)

    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        use(model)

    assert "start a new process" in caught.value.__notes__[0]
    assert not model.weight.any()
    emptied.assert_not_called()


def test_a_profiler_looks_on():
    """Composer #1749: profiler and automatic batch size were refused together."""
    expected, run = catalogue.adam(), catalogue.adam()
    (x, y), *_ = batches(1, 8)
    expected.step(x, y)
    step = fit_batch(inputs=INPUTS, capacity="1GiB", max_batch_size=16)(run.step)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert step.batch_size == 16
        with oom_guard() as guard, simulate_oom(fail_at=9):
            step(x, y)

    assert guard.limit == 4
    assert_same(snapshot(run), snapshot(expected))
    assert any(event.key == "Optimizer.step#Adam.step" for event in profile.key_averages())


# What several ranks share


@pytest.fixture
def one_rank(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this build of PyTorch has no torch.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def data_parallel(model):
    return nn.parallel.DistributedDataParallel(model)


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - not in every build
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("use", ["probe", "guard"])
@pytest.mark.parametrize("wrap", [data_parallel, sharded])
def test_a_model_whose_backward_talks_to_other_ranks_is_refused_before_it_runs(wrap, use):
    """
    PyTorch's own text: Expected to have finished reduction in the prior iteration; Composer #3866.

    Reductions run inside backward and count on every one of them ending, so a backward that
    ran out can't be run again, not even with one rank.
    """
    model = wrap(nn.Linear(4, 1))
    calls = []
    note = calls.append

    @fit_batch(inputs={"x": Input(4)}, capacity="1GiB", max_batch_size=2)
    def step(x):
        note(len(x))
        model(x).mean().backward()

    with pytest.raises(RankError, match=type(model).__name__):
        step.probe() if use == "probe" else oom_guard().run(step, torch.ones(4, 4))

    assert calls == []


def test_ranks_that_join_inside_the_guard_are_refused_when_memory_runs_out(mocker):
    """fairseq #708, #1821: one rank goes another way, and the others wait for ever."""
    mocker.patch("torch.distributed.is_available", return_value=True)
    mocker.patch("torch.distributed.get_world_size", return_value=2, create=True)
    sizes = []
    note = sizes.append

    def step(x):
        note(len(x))
        if len(x) > 4:
            raise torch.OutOfMemoryError(OOM)

    with oom_guard() as guard:
        guard.run(step, torch.ones(4))
        mocker.patch("torch.distributed.is_initialized", return_value=True, create=True)
        with pytest.raises(RankError, match="2 ranks"):
            guard.run(step, torch.ones(8))

    assert sizes == [4, 8]
