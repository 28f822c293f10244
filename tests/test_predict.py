"""What a step needs on a device that is not there, from a few small steps."""

import json

import pytest
import torch
import training as catalogue
from fakes import needs_fake_gpu, run_on_fake_gpu
from torch import nn
from training import assert_same, snapshot

from oomguard import Input, Prediction, fit_batch, predict
from oomguard.errors import InputError, PredictionError

MIB = 2**20


def linear_step():
    model = nn.Linear(1000, 1000)

    def step(x):
        model(x).square().mean().backward()

    return step


@pytest.mark.parametrize(
    ("options", "free_mib", "batch_size", "fits"),
    [
        ({"batch_size": 10_000}, 1598, 10_000, True),
        ({"batch_size": 10_000_000}, 1598, 10_000_000, False),
        ({}, 1598, None, True),
        ({"capacity": "500MiB"}, 50, None, True),
        ({"capacity": "1MiB"}, 0, None, False),
    ],
)
def test_a_prediction_says_whether_a_size_fits_and_the_largest_that_does(options, free_mib, batch_size, fits):
    found = predict(linear_step(), inputs={"x": Input(1000)}, **{"capacity": "2GiB", "headroom": 0, **options})

    # An item takes 4,000 bytes each for input, output, square and gradients; 450 MiB are the context's.
    assert free_mib * MIB // (10 * 4000) <= found.largest <= free_mib * MIB // (4 * 4000)
    assert found.batch_size == (found.largest if batch_size is None else batch_size)
    assert found.fits is fits
    assert found.traced_sizes == (2, 4)
    if fits:
        assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= found.budget_bytes


def test_a_prediction_leaves_nothing_behind_and_runs_only_small_steps():
    run = catalogue.adam()
    before = snapshot(run)
    seen = []

    def step(x, y):
        seen_append(len(x))
        return run.step(x, y)

    seen_append = seen.append
    inputs = {
        "x": Input(catalogue.FEATURES, dtype=torch.float64),
        "y": Input(dtype=torch.long, high=catalogue.CLASSES),
    }
    found = predict(step, inputs=inputs, capacity="1GiB", state=list(run.state.values()))

    assert found.largest > 1000
    assert set(seen) == {2, 4}
    assert_same(snapshot(run), before)


def test_a_decorated_step_predicts_with_its_own_options():
    step = fit_batch(inputs={"x": Input(1000)}, headroom=0, multiple_of=8, capacity="2GiB")(linear_step())

    found = step.predict()

    assert found.largest % 8 == 0
    assert found.capacity_bytes == 2048 * MIB
    assert step.predict(capacity="1GiB").largest < found.largest
    assert step.predict(7).batch_size == 7
    assert step.report is None  # nothing was probed
    assert predict(step, inputs={"x": Input(1000)}, capacity="2GiB", headroom=0).largest // 8 * 8 == found.largest


def test_a_prediction_is_words_data_and_a_picture(tmp_path):
    found = Prediction(
        "train_step",
        "cpu",
        (2, 4),
        16 * 1024 * MIB,
        15 * 1024 * MIB,
        0.05,
        188,
        256,
        False,
        100 * MIB,
        200 * MIB,
        3,
        ((1, 5), (9, 40)),
    )

    assert str(found) == (
        "train_step: 256 items would not fit\n"
        "peak allocated 100.00 MiB, reserved 200.00 MiB; the largest that would fit: 188\n"
        "budget 15.00 GiB of 16.00 GiB (headroom 0.05)\n"
        "from steps of 2 and 4 items on cpu; it has not run\n"
        "the growth of 3 allocations is a guess"
    )
    assert json.loads(json.dumps(found.to_dict()))["largest"] == 188
    assert "256 items would not fit" in found._repr_html_()
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "prediction.png")
    assert (tmp_path / "prediction.png").stat().st_size > 1000


def failing(x):
    raise RuntimeError("no kernel for this")


def growing(x):
    return [torch.empty(8) for _ in range(len(x))]


@pytest.mark.parametrize(
    ("step", "options", "error", "text"),
    [
        (
            failing,
            {},
            PredictionError,
            "failing does not run on cpu with 2 items, so its allocations can't be seen: no ke",
        ),
        (
            growing,
            {"capacity": "1MiB", "start": 3},
            PredictionError,
            "no two small steps of growing allocate in the same",
        ),
        (linear_step(), {"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1, got 0"),
        (linear_step(), {"capacity": "much"}, ValueError, "'much'"),
        (linear_step(), {"inputs": {"z": Input(1)}}, InputError, "z"),
    ],
)
def test_what_can_not_be_predicted_says_why(step, options, error, text):
    with pytest.raises(error, match=text) as caught:
        predict(step, **{"inputs": {"x": Input(1000)}, "capacity": "2GiB", **options})

    assert str(caught.value).startswith("oomguard: ")


def test_a_step_without_a_capacity_asks_for_one():
    step = fit_batch(inputs={"x": Input(1000)})(linear_step())

    with pytest.raises(ValueError, match="needs the capacity of the device"):
        step.predict()


@needs_fake_gpu
def test_on_the_fake_gpu_a_small_device_tells_what_a_large_one_holds():
    code = """
        import torch
        from oomguard import Input, fit_batch

        nn = torch.nn
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(57600, 10)).cuda()
        optimizer = torch.optim.Adam(model.parameters())

        @fit_batch(inputs={{"x": Input(3, 32, 32)}}, headroom=0)
        def step(x):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        print({expression})
    """

    predicted = run_on_fake_gpu(code.format(expression="step.predict(capacity='16GiB').largest"), "1GiB")
    true = run_on_fake_gpu(code.format(expression="step.probe(search='bisect').batch_size"), "16GiB")

    assert predicted == true
