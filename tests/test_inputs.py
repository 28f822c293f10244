"""The batch of a step: declared, made up, read from a call, cut, and put together again."""

import collections
import dataclasses
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

from oomguard import Input
from oomguard.errors import InputError
from oomguard.step.inputs import check_declared, even_sizes, join_results, make_dummy, may_hold_batch, read_batch

CPU = torch.device("cpu")


# Declarations


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            ((3, 224, 224),),
            {},
            TypeError,
            r"takes the sizes of one item one by one, like Input\(3, 224, 224\), not \(3,",
        ),
        ((3.0,), {}, TypeError, "takes the sizes of one item"),
        ((True,), {}, TypeError, "takes the sizes of one item"),
        ((-1,), {}, ValueError, "Input got the size -1"),
        ((3,), {"dtype": int}, TypeError, "dtype must be a torch.dtype"),
        ((3,), {"low": 5, "high": 5}, ValueError, "high must be greater than low=5, got 5"),
        ((3,), {"batch_dim": 2}, ValueError, "batch_dim must be from 0 to 1"),
        ((3,), {"batch_dim": -1}, ValueError, "batch_dim must be from 0 to 1"),
        ((3,), {"batch_dim": True}, ValueError, "batch_dim must be from 0 to 1"),
        ((), {"make": 3}, TypeError, "make must be a function of the batch size and the device, got 3"),
        ((3,), {"make": torch.ones}, ValueError, r"it can't stand beside the shape \(3,\)"),
    ],
)
def test_a_wrong_input_is_refused_where_it_is_written(arguments, options, error, message):
    with pytest.raises(error, match=f"^oomguard: .*{message}"):
        Input(*arguments, **options)


@pytest.mark.parametrize(
    ("declared", "shape", "dtype"),
    [
        (Input(), (5,), torch.float32),
        (Input(3, 2), (5, 3, 2), torch.float32),
        (Input(3, 2, batch_dim=1), (3, 5, 2), torch.float32),
        (Input(3, batch_dim=1, dtype=torch.float64), (3, 5), torch.float64),
        (Input(2, dtype=torch.bfloat16), (5, 2), torch.bfloat16),
        (Input(2, dtype=torch.float8_e4m3fn), (5, 2), torch.float8_e4m3fn),
        (Input(2, dtype=torch.complex64), (5, 2), torch.complex64),
        (Input(2, dtype=torch.bool), (5, 2), torch.bool),
        (Input(2, dtype=torch.uint8, high=256), (5, 2), torch.uint8),
        (Input(0), (5, 0), torch.float32),
    ],
)
def test_dummy_data_has_the_declared_shape_and_type(declared, shape, dtype):
    made = make_dummy({"x": declared}, 5, CPU)["x"]

    assert (tuple(made.shape), made.dtype, made.device) == (shape, dtype, CPU)


@pytest.mark.parametrize(
    ("declared", "low", "high"),
    [
        (Input(1000, low=-2, high=3), -2, 3),
        (Input(1000, low=1, high=1.5), 1, 1.5),
        (Input(1000, dtype=torch.long, low=3, high=7), 3, 6),
        (Input(1000, dtype=torch.int8, low=-4, high=0), -4, -1),
        (Input(1000, dtype=torch.long), 0, 0),
        (Input(1000, dtype=torch.int32, low=9), 9, 9),
    ],
)
def test_dummy_data_fills_the_declared_range(declared, low, high):
    made = make_dummy({"x": declared}, 10, CPU)["x"]

    assert made.min().item() == pytest.approx(low, abs=0.01)
    assert made.max().item() == pytest.approx(high, abs=0.01)


def test_floats_without_a_range_are_standard_normal():
    made = make_dummy({"x": Input(1000)}, 100, CPU)["x"]

    assert (made.mean().item(), made.std().item()) == pytest.approx((0, 1), abs=0.02)


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda n, device: torch.ones(32, 3), r"a batch of 32 \(shape \(32, 3\)\)"),
        (lambda n, device: torch.tensor(3.0), r"a Tensor without a batch dimension \(shape \(\)\)"),
        (lambda n, device: ["one"], "a batch of 1"),
        (lambda n, device: (i for i in range(n)), "a generator without a batch dimension"),
        (lambda n, device: 3, "a int without a batch dimension"),
    ],
)
def test_made_data_of_another_size_is_refused(make, seen):
    with pytest.raises(InputError, match=f"^oomguard: make of input 'a.b' was asked for 2 items and returned {seen}"):
        make_dummy({"a": {"b": Input(make=make)}}, 2, CPU)


class Pair(NamedTuple):
    """A batch of two."""

    left: object
    right: object


def test_dummy_data_nests_as_the_declaration_does():
    declared = {
        "batch": {"a": Input(1), "b": [Input(2), (Input(3),)]},
        "pair": Pair(Input(), Input(make=lambda n, _: ["x"] * n)),
    }

    made = make_dummy(declared, 2, CPU)

    assert made["batch"]["a"].shape == (2, 1)
    assert isinstance(made["batch"]["b"], list)
    assert isinstance(made["batch"]["b"][1], tuple)
    assert isinstance(made["pair"], Pair)
    assert made["pair"].right == ["x", "x"]


def only_by_position(x, /):
    return x


async def coroutine(x):
    return x


@pytest.mark.parametrize(
    ("inputs", "function", "message"),
    [
        ({"y": Input()}, lambda x: x, "has no argument 'y'; its arguments are x"),
        ({"y": Input()}, lambda: 0, "has no argument 'y'; its arguments are none"),
        ({}, lambda x: x, r"inputs must map .* got \{\}"),
        ([Input()], lambda x: x, "inputs must map"),
        ({"x": 3}, lambda x: x, r"inputs\['x'\] must be an Input, .* got 3"),
        ({"x": {"a": [Input(), None]}}, lambda x: x, r"inputs\['x.a.1'\] must be an Input"),
        ({"x": Input()}, lambda x, y: x, "needs 'y', which inputs does not declare"),
        ({"x": Input()}, lambda x, *, y: x, "needs 'y', which inputs does not declare"),
        ({"x": Input()}, only_by_position, "takes 'x' by position only"),
        ({"x": Input()}, coroutine, "is a generator or coroutine function"),
    ],
)
def test_a_declaration_that_does_not_fit_the_function_is_refused(inputs, function, message):
    with pytest.raises(InputError, match=message):
        check_declared(inputs, function)


FITTING = [
    lambda x: x,
    lambda x, y=3: x,
    lambda self, x: x,
    lambda cls, x: x,
    lambda **kwargs: 0,
    lambda x, *rest: x,
]


@pytest.mark.parametrize("function", FITTING, ids=range(len(FITTING)))
def test_a_declaration_that_fits_is_taken(function):
    check_declared({"x": Input()}, function)


# Calls


def step(x, y=None, *, scale=1.0):
    return x


X, Y = torch.arange(10.0).view(5, 2), torch.arange(5)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((X, Y), {}), ((X,), {"y": Y}), ((), {"x": X, "y": Y}), ((X,), {}), ((X,), {"scale": 2.0})]
)
@pytest.mark.parametrize(
    "inputs", [{"x": Input(2), "y": Input(dtype=torch.long)}, None], ids=["declared", "undeclared"]
)
def test_a_batch_is_read_however_it_is_passed(inputs, args, kwargs):
    batch = read_batch(step, inputs, args, kwargs)

    assert (batch.size, batch.shapes[0], batch.device) == (5, (2,), CPU)
    pieces = list(batch.pieces([3, 2]))
    assert [len(a[0] if a else k["x"]) for a, k in pieces] == [3, 2]
    assert all(k.get("scale", 2.0) == 2.0 for _, k in pieces)


@pytest.mark.parametrize(
    ("inputs", "args", "message"),
    [
        ({"x": Input(2), "y": Input()}, (X, torch.ones(3)), "'x' has 5, 'y' has 3"),
        ({"x": Input(2)}, (torch.ones(0, 2),), "'x' is a batch of 0 items"),
        ({"x": Input(2)}, ((i for i in range(3)),), "input 'x' is a generator without a batch dimension"),
        ({"x": Input(2)}, (7,), "input 'x' is a int without a batch dimension"),
        ({"x": Input()}, (torch.tensor(1.0),), "input 'x' is a Tensor without a batch dimension"),
        ({"x": Input(2)}, (object(),), "input 'x' is a object without a batch dimension"),
        ({"x": {"a": Input(), "b": Input()}}, ({"a": Y},), "input 'x' was declared with a, b and is dict with a"),
        ({"x": [Input()]}, (7,), "input 'x' was declared with 0 and is int"),
        ({"x": {"a": Input()}}, ({"a": Y, "b": Y},), "x.b is a tensor and is not declared"),
        ({"x": Input(2)}, (X, Y), "'y' is a tensor as long as the batch"),
        ({"y": Input()}, (X,), "has no batch"),
        (None, (X, torch.ones(3)), "'x' has 5, 'y' has 3"),
        (None, (X, ["a", "b"]), "'y' is a list of 2 entries beside a batch of 5"),
        (None, ({"names": ["a"], "x": X},), "'x.names' is a list of 1 entries beside a batch of 5"),
        (None, (iter([X]),), "'x' is an iterator"),
        (None, ([iter([X])],), "'x' is a list of 1 entries|'x.0' is an iterator"),
        (None, (nn.utils.rnn.pack_sequence([Y]),), "'x' is a PackedSequence"),
        (None, (torch.tensor(1.0), 3), "no tensor with a dimension is among its arguments"),
    ],
)
def test_a_call_whose_batch_can_not_be_split_is_refused(inputs, args, message):
    with pytest.raises(InputError, match=f"^oomguard: .*({message})"):
        read_batch(step, inputs, args, {})


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A batch in a dataclass."""

    x: object
    name: str = "n"


class Encoding(collections.UserDict):
    """A batch as tokenizers return it."""


NESTED = [
    {"x": X, "scalar": torch.tensor(3.0), "names": list("abcde"), "none": None},
    collections.OrderedDict(b=X, a=Y),
    collections.defaultdict(list, x=X),
    [X, (Y, {"deep": X})],
    Pair(X, "text"),
    Frozen(X),
    Encoding(x=X, y=Y),
]


def parts_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Frozen):
        yield value.x
    elif isinstance(value, dict | collections.UserDict):
        for entry in value.values():
            yield from parts_of(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from parts_of(entry)


@pytest.mark.parametrize("nested", NESTED, ids=lambda nested: type(nested).__name__)
def test_pieces_put_together_are_the_original(nested):
    pieces = [args[0] for args, _ in read_batch(step, None, (nested,), {}).pieces([2, 2, 1])]

    assert {type(piece) for piece in pieces} == {type(nested)}
    for whole, *cut in zip(parts_of(nested), *map(parts_of, pieces), strict=True):
        if whole.dim():
            assert torch.equal(torch.cat(cut), whole)
            assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in cut)
        else:
            assert all(part is whole for part in cut)


def test_lists_are_cut_and_what_holds_no_batch_passes_whole():
    model = nn.Linear(2, 2)

    ((args, kwargs), _) = read_batch(
        lambda x, *rest, **more: 0, None, (X, ["a"] * 5, model), {"z": 3, "m": model}
    ).pieces([4, 1])

    assert args[1] == ["a"] * 4
    assert args[2] is model
    assert kwargs == {"z": 3, "m": model}


def test_a_declared_list_is_a_batch():
    batch = read_batch(step, {"x": Input(make=list)}, ([torch.ones(2), torch.ones(3), torch.ones(4)],), {})

    assert (batch.size, batch.shapes) == (3, ())
    assert [len(args[0]) for args, _ in batch.pieces([2, 1])] == [2, 1]


def test_a_function_without_a_signature_is_read_too():
    assert read_batch(max, None, (X,), {}).size == 5
    assert read_batch(step, None, (X, Y, 1, 2, 3), {}).size == 5  # a call that will fail by itself


def test_what_may_hold_a_batch_is_told_from_models_and_numbers():
    assert all(map(may_hold_batch, (X, [X], {"x": X}, Pair(X, X), Frozen(X), ())))
    assert not any(map(may_hold_batch, (nn.Linear(1, 1), 3, "text", None, Frozen)))


@pytest.mark.parametrize("smallest", [1, 2, 3])
def test_sizes_are_even_and_as_few_as_can_be(smallest):
    for total, largest in itertools.product(range(1, 41), range(1, 41)):
        sizes = even_sizes(total, largest, smallest)

        assert sum(sizes) == total
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        if sizes[0] > largest:  # then one more piece would be too small
            assert total // (len(sizes) + 1) < smallest
        else:
            assert len(sizes) == math.ceil(total / largest)
        assert sizes[-1] >= min(smallest, total)


# Results


def two(first, second):
    return join_results([first, second], [3, 2], [0.6, 0.4])


T = torch.tensor


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (T(1.0), T(2.0), T(1.4)),  # and not 1.5
        (1.0, 2.0, 1.4),
        (T(3), T(1), T(4)),
        (3, 1, 4),
        (torch.ones(3, 2), torch.zeros(2, 2), T([[1.0, 1]] * 3 + [[0.0, 0]] * 2)),
        (T([1, 2, 3]), T([4, 5]), T([1, 2, 3, 4, 5])),
        (T([1.0, 2, 3, 4]), T([2.0, 3, 4, 5]), T([1.4, 2.4, 3.4, 4.4])),
        (T([1, 1]), T([2, 3]), T([3, 4])),
        (["a", "b", "c"], ["d", "e"], ["a", "b", "c", "d", "e"]),
        (None, None, None),
        ("same", "same", "same"),
        (True, True, True),
        (T(True), T(True), T(True)),
        ({"loss": 1.0, "n": (3, None)}, {"loss": 2.0, "n": (2, None)}, {"loss": 1.4, "n": (5, None)}),
        (Pair(1.0, [T(1)]), Pair(2.0, [T(2)]), Pair(1.4, [T(3)])),
        (Frozen(1.0), Frozen(2.0), Frozen(1.4)),
    ],
    ids=range(16),
)
def test_results_are_joined_as_the_whole_batch_would_have_returned_them(first, second, joined):
    if isinstance(joined, torch.Tensor):
        torch.testing.assert_close(two(first, second), joined)
    else:
        assert repr(two(first, second)) == repr(joined)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a", "b"),
        (True, False),
        (T(True), T(False)),
        (1, 1.0),
        ({"a": 1}, {"b": 1}),
        ([1.0, 2.0], [1.0]),
        (torch.ones(4), torch.ones(5)),
        (X.to_sparse(), "text"),
        (object(), object()),
    ],
    ids=range(9),
)
def test_results_without_a_rule_are_refused(first, second):
    with pytest.raises(InputError, match=r"^oomguard: result.* differs between the pieces of one batch"):
        two(first, second)


def test_a_result_that_can_not_be_compared_is_no_equal_one():
    class Odd:
        def __eq__(self, other):
            raise ValueError("ambiguous")

        __hash__ = None

    with pytest.raises(InputError, match="differs"):
        two(Odd(), Odd())


def test_a_piece_without_a_share_counts_nothing():
    nan = T(float("nan"))

    assert join_results([T(2.0), nan], [3, 2], [1.0, 0.0]) == 2
    assert join_results([2.0, float("nan")], [3, 2], [1.0, 0.0]) == 2


def test_a_single_result_is_returned_as_it_is():
    result = object()

    assert join_results([result], [5], [1.0]) is result
