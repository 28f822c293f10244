"""The searches: which sizes they try, and that they end on the largest that fits."""

import dataclasses

import pytest

from oomguard.memory.replay import Replay
from oomguard.memory.trace import NEVER, Trace
from oomguard.search import SEARCHES, bisect, double, replay


@dataclasses.dataclass
class FakeTrials:
    """A step that needs *need(size)* bytes, on a device of *capacity* bytes; what it allocates, one thing at a time."""

    capacity: int
    need: object = int
    traced: object = None  # what a trace shows of a size; default: the truth
    may_trace: bool = True

    def __post_init__(self):
        self.tried, self.remarks, self.traces = [], [], {}

    def run(self, size, steps=None):
        self.tried.append((size, steps or 3))
        sizes = tuple((self.traced or (lambda size: [self.need(size)]))(size))
        if self.may_trace and (steps or 3) > 1:
            order = tuple(number for k in range(len(sizes)) for number in (k, ~k))
            self.traces[size] = Trace(size, order, sizes, (0,) * len(sizes), (len(order),))
        return self.need(size) <= self.capacity

    def predict(self, model: Replay, guess):
        return model.largest(NEVER, self.capacity, guess)

    def remark(self, text):
        self.remarks.append(text)

    @property
    def misses(self):
        return [size for size, _ in self.tried if self.need(size) > self.capacity]


def sizes_tried(search, capacity, *, start=2, cap=None):
    trials = FakeTrials(capacity)
    answer = search(trials, start, cap)
    return answer, [size for size, _ in trials.tried]


@pytest.mark.parametrize(
    ("capacity", "start", "cap", "expected"),
    [
        (0, 2, None, [2, 1]),
        (1, 2, None, [2, 1]),
        (2, 2, None, [2, 4]),
        (11, 2, None, [2, 4, 8, 16]),
        (16, 2, None, [2, 4, 8, 16, 32]),
        (100, 2, 100, [2, 4, 8, 16, 32, 64, 100]),
        (90, 2, 100, [2, 4, 8, 16, 32, 64, 100]),
        (3, 64, None, [64, 32, 16, 8, 4, 2]),
        (100, 2, 1, [1]),
        (100, 64, 5, [5]),
    ],
)
def test_doubling_tries_these_sizes(capacity, start, cap, expected):
    assert sizes_tried(double, capacity, start=start, cap=cap)[1] == expected


@pytest.mark.parametrize(
    ("capacity", "start", "cap", "expected"),
    [
        (0, 2, None, [2, 1]),
        (1, 2, None, [2, 1]),
        (2, 2, None, [2, 4, 3]),
        (11, 2, None, [2, 4, 8, 16, 12, 10, 11]),
        (16, 2, None, [2, 4, 8, 16, 32, 24, 20, 18, 17]),
        (90, 2, 100, [2, 4, 8, 16, 32, 64, 100, 82, 91, 86, 88, 89, 90]),
        (100, 2, 100, [2, 4, 8, 16, 32, 64, 100]),
        (3, 64, None, [64, 32, 16, 8, 4, 2, 3]),
    ],
)
def test_bisecting_tries_these_sizes(capacity, start, cap, expected):
    assert sizes_tried(bisect, capacity, start=start, cap=cap)[1] == expected


@pytest.mark.parametrize(
    ("capacity", "start", "cap", "expected"),
    [
        (0, 2, None, [(2, 1), (1, 1)]),
        (1, 2, None, [(2, 1), (1, 1), (1, 2), (1, 3)]),
        (1000, 2, None, [(2, 1), (2, 2), (4, 2), (128, 2), (240, 2), (496, 2), (1000, 3)]),
        (1000, 2, 100, [(2, 1), (2, 2), (4, 2), (100, 3)]),  # far below what fits
        (101, 2, 100, [(2, 1), (2, 2), (4, 2), (24, 2), (48, 2), (100, 3)]),
        (10, 64, None, [(64, 1), (32, 1), (16, 1), (8, 1), (8, 2), (15, 2), (10, 3)]),
    ],
)
def test_replaying_tries_these_sizes_for_so_many_steps(capacity, start, cap, expected):
    trials = FakeTrials(capacity)

    answer = replay(trials, start, cap)

    assert trials.tried == expected
    assert answer == min(capacity, cap or capacity)


@pytest.mark.parametrize("cap", [None, 1, 5, 64, 100, 1000])
@pytest.mark.parametrize("start", [1, 2, 3, 7, 64, 500])
@pytest.mark.parametrize("name", SEARCHES)
def test_searches_agree_with_brute_force_at_every_capacity(name, start, cap):
    for capacity in range(201):
        answer, tried = sizes_tried(SEARCHES[name], capacity, start=start, cap=cap)
        true = min(capacity, cap or capacity)

        assert answer in tried or answer == 0
        assert name == "replay" or len(set(tried)) == len(tried)
        assert all(size <= (cap or size) for size in tried)
        if name == "double":
            reached = [size for size in tried if size <= capacity]
            assert answer == max(reached, default=0)
            assert answer <= true < 2 * answer + 1 or answer == 0
        else:
            assert answer == true


@pytest.mark.parametrize("capacity", [*range(40), 100, 1000, 12345])
def test_what_a_replay_search_answers_has_run_in_full(capacity):
    for may_trace in (True, False):
        trials = FakeTrials(capacity, may_trace=may_trace)

        answer = replay(trials, 2, None)

        assert answer == capacity
        assert (answer, 3) in trials.tried or answer == 0
        assert may_trace or answer < 2 or any("could not be traced" in remark for remark in trials.remarks)


GROWTH = {
    "a constant beside": (lambda size: 5_000_000 + 700 * size, 0),
    "the square of the batch": (lambda size: 300 * size * size, 0),
    "a parabola": (lambda size: 5_000 + 700 * size + 3 * size * size, 0),
    "chunks of four": (lambda size: 900 * -(-size // 4), 3),  # no polynomial, but almost
}


@pytest.mark.parametrize(("need", "misses"), GROWTH.values(), ids=GROWTH)
@pytest.mark.parametrize("capacity", [7_000_000, 50_000_000, 3_000_000_000])
def test_growth_along_a_polynomial_is_met_without_a_miss(need, misses, capacity):
    trials = FakeTrials(capacity, need)

    answer = replay(trials, 2, None)

    assert need(answer) <= capacity < need(answer + 1 + answer * misses // 10**6)
    assert len(trials.misses) <= misses
    assert not trials.remarks


def test_a_buffer_that_appears_at_larger_sizes_is_met_on_the_way_there():
    def sizes(size):
        return [1000 * size, 1000 * size, 1000 * size] + [3000 * size] * (size > 100) + [1000 * size, 1000 * size] * 3

    trials = FakeTrials(3_000_000, lambda size: max(sizes(size)), sizes)

    assert replay(trials, 2, None) == 1000
    assert trials.misses == []
    assert [size for size, _ in trials.tried] == [2, 2, 4, 128, 240, 496, 1000]


def test_a_buffer_that_stops_growing_does_not_stop_the_search():
    def sizes(size):
        return [1000 * size, 10_000 * min(size, 50)] * 5

    trials = FakeTrials(1_000_000, lambda size: max(sizes(size)), sizes)

    assert replay(trials, 2, None) == 1000
    assert trials.misses == []


def test_a_step_that_needs_more_than_its_traces_say_is_stepped_down_from_and_bisected_at_last():
    trials = FakeTrials(1000, int, lambda size: [size // 2 + 1])

    assert replay(trials, 2, None) == 1000
    assert any("predictions did not run" in remark for remark in trials.remarks)


def test_a_little_less_than_predicted_costs_few_misses():
    trials = FakeTrials(1000, int, lambda size: [size * 997 // 1000])

    answer = replay(trials, 2, None)

    assert 985 <= answer <= 1000
    assert len(trials.misses) <= 3


def test_orders_that_differ_at_every_size_are_bisected_and_said_so():
    trials = FakeTrials(100, int, lambda size: [size] * size)

    assert replay(trials, 2, None) == 100
    assert any("no two traces agreed" in remark for remark in trials.remarks)
