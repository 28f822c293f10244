"""Memory runs out at the first allocation of a step, then at the second, and so on: exact every time, or an error."""

import gc
import logging
import multiprocessing
import os

import matrix
import pytest
import torch
from matrix import AS_BEFORE, CELLS, CHANGED, EXACT, Cell, Mode

# Every optimizer, every model and every style; all of them with each other behind the marker.
SOME = [
    Cell("Adam", "MLP", "update in the step"),
    Cell("SGD momentum", "CNN", "update in the step"),
    Cell("AdamW for-loop", "transformer", "checkpointing"),
    Cell("AdamW foreach", "MLP", "scaler, clip, scheduler"),
    Cell("RMSprop", "LSTM", "update in the loop"),
    Cell("Adam", "CNN", "accumulation"),
    Cell("Adagrad", "MLP", "GAN"),
    Cell("LBFGS", "MLP", "update in the step"),
]


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="oomguard")  # thousands of lines


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Every OOM ends in a garbage collection, which need not look at all that was imported."""
    matrix.judge(SOME[2], Mode(0), 1)  # imports what PyTorch imports late
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


pytestmark = pytest.mark.filterwarnings("ignore::oomguard.errors.OOMGuardWarning")  # batch norm, dropout


def check(cell, mode, found):
    assert [point.reason for point in found if point.reason] == []
    expected = {EXACT if matrix.can_be_split(cell) else AS_BEFORE}
    may_change = mode.call > 0 and not mode.snapshot and matrix.updates_inside(cell)
    assert {point.verdict for point in found} - ({CHANGED} if may_change else set()) == expected


@pytest.mark.parametrize("mode", matrix.MODES, ids=str)
@pytest.mark.parametrize("cell", SOME, ids=str)
def test_training_is_exact_or_refused_wherever_memory_runs_out(cell, mode):
    if mode in matrix.modes(cell):
        check(cell, mode, matrix.points(cell, mode, stride=3))


@pytest.mark.parametrize("mode", [Mode(0), Mode(1), Mode(1, in_pieces=True)], ids=str)
def test_memory_may_run_out_twice_in_a_call(mode):
    cell = SOME[0]

    found = matrix.pairs(cell, mode, stride=7)

    check(cell, mode, found)


def _prepare():
    torch.set_num_threads(1)
    logging.getLogger("oomguard").setLevel(logging.CRITICAL)
    matrix.judge(SOME[2], Mode(0), 1)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def pool():
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), _prepare) as made:
        yield made


@pytest.mark.every_allocation
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_whole_matrix(cell, pool, judged):
    modes = matrix.modes(cell)

    found = pool.starmap(matrix.points, [(cell, mode) for mode in modes], chunksize=1)

    judged[cell] = [point for points in found for point in points]
    for mode, points in zip(modes, found, strict=True):
        check(cell, mode, points)


@pytest.mark.every_allocation
@pytest.mark.parametrize("mode", [Mode(0), Mode(1), Mode(1, snapshot=True), Mode(1, in_pieces=True)], ids=str)
@pytest.mark.parametrize("cell", [SOME[0], SOME[1]], ids=str)
def test_memory_may_run_out_twice_anywhere(cell, mode):
    check(cell, mode, matrix.pairs(cell, mode, stride=2))
