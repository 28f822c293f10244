"""The searches, and what a probe tells, refuses and leaves behind."""

import gc
import itertools
import logging
import random
import re
import sys

import numpy as np
import pytest
import torch
import training as catalogue
from torch import nn
from training import assert_same, snapshot

from oomguard import BatchLimitError, Input, fit_batch, oom_guard
from oomguard.errors import InputError
from oomguard.testing import simulate_oom

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


def failing_above(capacity, error=None, **options):
    """A step that raises above *capacity* items, and the sizes that it was called with."""
    seen = []

    @fit_batch(inputs={"x": Input(3)}, steps_per_trial=1, **{"search": "bisect", "capacity": "1GiB", **options})
    def step(x):
        seen_append(len(x))
        if len(x) > capacity:
            raise error or torch.OutOfMemoryError(OOM)
        return x.mean()

    seen_append = seen.append  # bound here: what the step can reach is put back after the probe
    return step, seen


@pytest.mark.parametrize(
    ("options", "capacity", "answer", "ended"),
    [
        ({}, 11, 11, "out of memory at 12"),
        ({"search": "double"}, 11, 8, "out of memory at 16"),
        ({"search": "replay"}, 11, 11, "out of memory at 12"),
        ({"search": "replay", "multiple_of": 4}, 11, 8, "out of memory at 12"),
        ({"start": 64}, 3, 3, "out of memory at 4"),
        ({"max_batch_size": 6}, 10, 6, "max_batch_size is 6"),
        ({"dataset_size": 5}, 10, 5, "the data set has 5 items"),
        ({"dataset_size": 10, "max_batch_size": 6}, 99, 6, "max_batch_size is 6"),
        ({"dataset_size": 1}, 99, 1, "the data set has 1 items"),
        ({"multiple_of": 8}, 30, 24, "out of memory at 32"),
        ({"multiple_of": 8, "start": 20, "max_batch_size": 60}, 99, 56, "max_batch_size is 60"),
    ],
)
def test_the_answer_has_run_and_the_report_says_why_it_ended(options, capacity, answer, ended):
    step, _ = failing_above(capacity, **options)

    report = step.probe()

    assert (report.batch_size, report.ended) == (answer, ended)
    assert any(trial.passed and trial.batch_size == answer for trial in report.trials)
    assert all(trial.batch_size % options.get("multiple_of", 1) == 0 for trial in report.trials)
    assert report.search == options.get("search", "bisect")


def test_a_step_that_runs_out_only_in_its_second_call_is_found_out():
    calls = {}

    @fit_batch(inputs={"x": Input(3)}, capacity="1GiB", search="double")
    def step(x):
        calls[len(x)] = calls.get(len(x), 0) + 1
        if len(x) == 32 and calls[32] == 2:
            raise torch.OutOfMemoryError(OOM)
        return x.mean()

    assert step.batch_size == 16
    assert calls == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("input tensor must fit into 32-bit index math"), "size limit: input tensor must fit"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
            "out",
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), "perhaps memory"),
    ],
)
def test_what_a_smaller_batch_may_cure_ends_the_growth_by_its_name(error, reason):
    step, _ = failing_above(9, error)

    report = step.probe()

    assert report.batch_size == 9
    assert next(trial for trial in report.trials if not trial.passed).reason.startswith(reason)
    assert report.ended.endswith(" at 10")


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (ValueError("shapes differ"), None),
        (RuntimeError("index out of range in self"), None),
        (MemoryError(), "host memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "context is lost"),
        (RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling 'cublasCreate(handle)'"), None),
        (KeyboardInterrupt(), None),
        (StopIteration(), None),
    ],
)
def test_any_other_error_passes_through_unchanged(error, note):
    step, _ = failing_above(0, error)

    with pytest.raises(type(error)) as caught:
        step.probe()

    assert caught.value is error
    assert note is None or note in error.__notes__[0]
    assert step.report is None


def test_where_nothing_fits_the_error_tells_all_that_was_tried():
    step, _ = failing_above(0, start=4)

    with pytest.raises(BatchLimitError) as caught:
        step.probe()

    message = str(caught.value)
    assert message.startswith("oomguard: failing_above.<locals>.step does not fit on cpu at any batch size")
    for part in (
        "tried 4, 2, 1",
        "peak ",
        "budget 972.80 MiB of 1.00 GiB",
        f"The first error was: out of memory: {OOM}",
    ):
        assert part in message
    assert [trial.batch_size for trial in caught.value.report.trials] == [4, 2, 1]
    assert caught.value.report.batch_size is None
    assert isinstance(caught.value, torch.OutOfMemoryError)


def test_a_peak_over_the_budget_does_not_fit_even_if_nothing_was_raised():
    @fit_batch(inputs={"x": Input(256)}, search="double", headroom=0.5)
    def step(x):
        return (x * 2).mean()

    with simulate_oom(2**20):
        report = step.probe()

    assert report.budget_bytes == 2**19
    assert report.ended == "over the budget at 256"
    assert report.trials[-1].peak_reserved_bytes > report.budget_bytes


def test_a_step_that_does_nothing_is_no_proof():
    @fit_batch(inputs={"x": Input(3)})
    def step(x):
        return x

    with pytest.raises(InputError, match=r"oomguard: .*step did nothing with its inputs: no tensor operation ran"):
        step.probe()


def test_a_step_that_takes_from_an_iterator_is_refused_before_it_takes():
    batches = iter([torch.ones(2), torch.ones(2)])

    @fit_batch(inputs={"x": Input(3)})
    def step(x):
        return x.mean() + next(batches).mean()

    with pytest.raises(InputError, match=r"oomguard: .*step takes from an iterator, 'batches'"):
        step.probe()

    assert len(list(batches)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0}, "start must be a whole number of at least 1, got 0"),
        ({"start": 2.0}, "start must be a whole number of at least 1, got 2.0"),
        ({"steps_per_trial": 0}, "steps_per_trial must be a whole number of at least 1, got 0"),
        ({"multiple_of": -8}, "multiple_of must be a whole number of at least 1, got -8"),
        ({"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1, got 0"),
        ({"dataset_size": True}, "dataset_size must be a whole number of at least 1, got True"),
        ({"headroom": -0.1}, "headroom is the fraction .* from 0 to less than 1, got -0.1"),
        ({"headroom": 1.5}, "headroom is the fraction .* from 0 to less than 1, got 1.5"),
        ({"headroom": "5%"}, "headroom is the fraction .* got '5%'"),
        ({"start": 8, "max_batch_size": 4}, "max_batch_size=4 is less than start=8"),
        ({"search": "binary"}, "search must be one of 'bisect', 'double', 'replay', got 'binary'"),
        ({"multiple_of": 8, "dataset_size": 7}, "no multiple of multiple_of=8 is within the largest size 7"),
        ({"capacity": "8 GB"}, "capacity='8 GB' is no size"),
    ],
)
def test_an_option_out_of_range_is_refused_where_it_is_given(options, message):
    with pytest.raises(ValueError, match=f"^oomguard: {message}"):
        fit_batch(inputs={"x": Input(3)}, **options)


def test_an_unknown_device_is_refused_where_it_is_given():
    with pytest.raises(RuntimeError, match="abacus"):
        fit_batch(inputs={"x": Input(3)}, device="abacus")


class Normed(nn.Module):
    """Batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(catalogue.FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, catalogue.CLASSES)
        )

    def forward(self, x):
        return self.net(x)


def normed():
    torch.manual_seed(0)
    model = Normed().double()
    opt = torch.optim.Adam(model.parameters())

    def step(x, y):
        model.train()
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) + random.random() + float(np.random.rand())
        loss.backward()
        opt.step()
        return loss.detach()

    return catalogue.Training(step, {"model": model, "opt": opt})


INPUTS = {
    "x": Input(catalogue.FEATURES, dtype=torch.float64),
    "y": Input(dtype=torch.long, high=catalogue.CLASSES),
}


def tensors_alive():
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}


STYLES = [normed, catalogue.sgd_momentum, catalogue.adam, catalogue.adamw_amp_scheduler]
MORE = [catalogue.averaged_model, catalogue.accumulation_over_calls, catalogue.attribute_counter, catalogue.queue]


@pytest.mark.parametrize(
    ("make", "ending", "trained"),
    [
        *itertools.product(STYLES, ["passes", "fits nothing", "raises"], [False, True]),
        *itertools.product([*MORE, catalogue.gan], ["passes"], [True]),
    ],
)
def test_a_probe_leaves_nothing_behind(make, ending, trained):
    run = make()
    if trained:
        run.step(*catalogue.batches(1, 8)[0])
    step = fit_batch(inputs=INPUTS, max_batch_size=16, capacity="1KiB" if ending == "fits nothing" else "1GiB")(
        run.step
    )
    if ending == "raises":
        step = fit_batch(inputs={**INPUTS, "y": Input(dtype=torch.long, low=10)}, capacity="1GiB")(run.step)
    modes = [m.training for m in run.state["model"].modules()]
    before = snapshot(run)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    alive = tensors_alive()

    if ending == "passes":
        assert step.batch_size == 16
    else:
        with pytest.raises(BatchLimitError if ending == "fits nothing" else IndexError):
            step.probe()

    assert_same(snapshot(run), before, rtol=0, atol=0)
    assert modes == [m.training for m in run.state["model"].modules()]
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    sys.last_exc = None
    assert tensors_alive() - alive == set() or ending == "raises"  # there the caught error still holds its frames


def test_a_probe_on_a_cpu_stays_within_what_the_model_leaves():
    model = nn.Linear(1024, 64)  # 256 KiB

    @fit_batch(inputs={"x": Input(1024)}, capacity="1MiB", headroom=0.0)
    def step(x):
        return model(x).mean()

    report = step.probe()

    assert report.capacity_bytes == 2**20
    assert all(trial.peak_allocated_bytes >= sum(p.nbytes for p in model.parameters()) for trial in report.trials)
    # 4 KiB for an item, twice while the next batch is made, and 256 bytes of output
    assert report.batch_size == pytest.approx((2**20 - 2**18 - 256) / (2 * 4096), rel=0.05)


@pytest.mark.parametrize("allocation", range(1, 60, 2))
def test_a_trial_that_ran_out_anywhere_leaves_later_ones_whole(allocation):
    """Adam's state may be half made; the next trial would stumble over it."""
    run = catalogue.adam()
    before = snapshot(run)
    step = fit_batch(inputs=INPUTS, start=8, max_batch_size=8, search="double")(run.step)

    with simulate_oom("1GiB", fail_at=allocation):
        report = step.probe()

    assert [(trial.batch_size, trial.passed) for trial in report.trials] == [(8, False), (4, True)]
    assert_same(snapshot(run), before, rtol=0, atol=0)


def test_a_guard_around_the_probe_does_not_hide_what_does_not_fit():
    @fit_batch(inputs={"x": Input(3)})
    def inner(x):
        if len(x) > 5:
            raise torch.OutOfMemoryError(OOM)
        return x.mean()

    outer = fit_batch(inputs={"x": Input(3)}, capacity="1GiB")(lambda x: inner(x) + 0)

    with oom_guard() as guard:
        assert outer.batch_size == 5
        outer(torch.ones(2, 3))

    assert guard.report.calls == 1


def test_every_trial_is_a_log_line(caplog):
    step, _ = failing_above(3)

    with caplog.at_level(logging.INFO, "oomguard"):
        step.probe()

    lines = [re.sub(r"^oomguard: \S+ with ", "", record.getMessage()) for record in caplog.records]
    assert lines == ["2 items: ran", f"4 items: out of memory: {OOM}", "3 items: ran"]


def test_the_progress_bar_counts_trials(capsys):
    pytest.importorskip("tqdm")
    step, _ = failing_above(3, progress=True)

    step.probe()

    assert "3 trials" in capsys.readouterr().err


def test_a_progress_bar_without_tqdm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    step, _ = failing_above(3, progress=True)

    with pytest.raises(ImportError, match=r"pip install 'oomguard\[progress\]'"):
        step.probe()
