"""Tables and pictures of what a probe and a guard have seen."""

import dataclasses
import json
import sys

import pytest

from oomguard import FitReport, GuardReport, Trial
from oomguard.report import GuardEvent

GIB = 2**30
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB " + "and more " * 9
FIT = FitReport(
    step="<lambda>",
    device="cuda:0",
    capacity_bytes=16 * GIB,
    budget_bytes=15 * GIB,
    headroom=0.0625,
    search="bisect",
    batch_size=4,
    ended="out of memory at 8",
    trials=(
        Trial(2, True, "", 4 * GIB, 5 * GIB, 0.5, 3),
        Trial(4, True, "", 8 * GIB, 10 * GIB, 0.75, 3),
        Trial(8, False, f"out of memory: {OOM}", 15 * GIB, 16 * GIB, 0.1, 0),
        Trial(6, False, "over the budget: 15.50 GiB of 15.00 GiB", 12 * GIB, int(15.5 * GIB), 1.0, 3),
    ),
    restored=("model (ResNet, 161 tensors)", "random state"),
)
FIT_TEXT = """\
<lambda> on cuda:0: batch size 4 (search: bisect, 4 trials)
batch size  steps           result  allocated   reserved  of device  seconds  samples/s
         2      3              ran   4.00 GiB   5.00 GiB        31%     0.50       12.0
         4      3              ran   8.00 GiB  10.00 GiB        62%     0.75       16.0  <- answer
         8      0    out of memory  15.00 GiB  16.00 GiB       100%     0.10          -
         6      3  over the budget  12.00 GiB  15.50 GiB        97%     1.00          -
budget 15.00 GiB of 16.00 GiB (headroom 0.0625); ended: out of memory at 8
restored: model (ResNet, 161 tensors), random state
first error: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB and more and more ..."""
NOTHING = dataclasses.replace(
    FIT, batch_size=None, trials=(Trial(1, False, "over the budget", 2**20, 2**20, 0.0, 3),), restored=("random state",)
)
NOTHING_TEXT = """\
<lambda> on cuda:0: nothing fits (search: bisect, 1 trial)
batch size  steps           result  allocated  reserved  of device  seconds  samples/s
         1      3  over the budget   1.00 MiB  1.00 MiB         0%     0.00          -
budget 15.00 GiB of 16.00 GiB (headroom 0.0625); ended: out of memory at 8
restored: random state"""
GUARD = GuardReport(
    calls=7,
    ooms=2,
    split_calls=3,
    limits={"train_step": 32},
    events=(
        GuardEvent(2, "train_step", "out of memory", 64, 64, 32, 15 * GIB, 16 * GIB, OOM),
        GuardEvent(5, "train_step", "grown", 64, 32, 64, 15 * GIB, 16 * GIB, "3 good calls"),
        GuardEvent(6, "train_step", "out of memory", 64, 64, 32, 15 * GIB, 16 * GIB, OOM),
    ),
)
GUARD_TEXT = """\
7 guarded calls: 2 out-of-memory errors met, 3 run in pieces
call        step          event  batch size  largest piece       peak     device
   2  train_step  out of memory          64       64 -> 32  15.00 GiB  16.00 GiB
   5  train_step          grown          64       32 -> 64  15.00 GiB  16.00 GiB
   6  train_step  out of memory          64       64 -> 32  15.00 GiB  16.00 GiB
largest piece of train_step: 32
first error: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB and more and more ..."""
QUIET = GuardReport(1, 0, 0, {}, ())


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (FIT, FIT_TEXT),
        (NOTHING, NOTHING_TEXT),
        (GUARD, GUARD_TEXT),
        (QUIET, "1 guarded call: 0 out-of-memory errors met, 0 run in pieces"),
    ],
    ids=["fit", "nothing fits", "guard", "quiet guard"],
)
def test_a_report_is_a_table(report, text):
    assert str(report) == text


def test_a_notebook_shows_the_same_with_its_special_characters_escaped():
    shown = FIT._repr_html_()

    assert "&lt;lambda&gt; on cuda:0: batch size 4" in shown
    assert "<lambda>" not in shown
    assert shown.count("<tr>") == 5
    assert "<table>" not in QUIET._repr_html_()


@pytest.mark.parametrize("report", [FIT, GUARD, QUIET], ids=["fit", "guard", "quiet guard"])
def test_a_report_is_plain_data_too(report):
    plain = json.loads(json.dumps(report.to_dict()))

    assert plain.keys() == {field.name for field in dataclasses.fields(report)}


def test_a_trial_that_did_not_run_has_no_speed():
    assert [trial.samples_per_second for trial in FIT.trials] == [12.0, 16.0, 0.0, 0.0]
    assert Trial(2, True, "", 0, 0, 0.0, 3).samples_per_second == 0.0


@pytest.mark.parametrize("report", [FIT, NOTHING, GUARD, QUIET], ids=["fit", "nothing fits", "guard", "quiet guard"])
def test_a_report_is_drawn(report, tmp_path):
    pytest.importorskip("matplotlib")

    figure = report.plot(tmp_path / "report.png")

    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert figure.axes[0].get_title()
    assert report.plot() is not figure


def test_the_picture_shows_every_trial_the_budget_and_the_answer():
    pytest.importorskip("matplotlib")

    report = dataclasses.replace(FIT, curve=((1, 3 * GIB), (9, 17 * GIB)))
    (axes,) = report.plot().axes

    curve, capacity, budget, answer, ran, failed = axes.lines
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([1, 9], [3, 17])
    assert (list(ran.get_xdata()), list(ran.get_ydata())) == ([2, 4], [5, 10])
    assert (list(failed.get_xdata()), list(failed.get_ydata())) == ([8, 6], [16, 15.5])
    assert (capacity.get_ydata()[0], budget.get_ydata()[0], answer.get_xdata()[0]) == (16, 15, 4)
    assert axes.get_ylabel() == "memory (GiB)"
    assert len(FIT.plot().axes[0].lines) == 5  # without a replay there is no curve


def test_without_matplotlib_a_picture_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ImportError, match=r"^oomguard: plots need matplotlib: pip install 'oomguard\[plot\]'"):
        FIT.plot()
