"""What a replay makes of a trace: sizes as polynomials, steps that repeat, and the allocator's rules."""

import dataclasses
from pathlib import Path

import pytest
from fakes import child_on_fake_gpu, needs_fake_gpu, run_on_fake_gpu

from oomguard.memory.replay import Outcome, Polynomial, Replay, extend, fit, rounded
from oomguard.memory.trace import Allocator, Block, Segment, Trace

MIB = 2**20


def trace_of(order, sizes, *, ends=None, allocator=None, segments=(), batch_size=1):
    return Trace(
        batch_size=batch_size,
        order=tuple(order),
        sizes=tuple(sizes),
        pools=(0,) * len(sizes),
        ends=tuple(ends or [len(order)]),
        segments=segments,
        allocator=allocator,
    )


def outcome(order, sizes, limit_bytes=2**40, **options):
    trace = trace_of(order, sizes, **{"allocator": Allocator(), **options})
    return Replay(trace, [Polynomial(0, 0, size, 1) for size in sizes]).run(1, limit_bytes)


@pytest.mark.parametrize(
    ("batch_sizes", "sizes", "at", "expected", "believed"),
    [
        ((2, 4), (512, 512), 100, 512, True),
        ((2, 4), (800, 1600), 100, 40_000, True),
        ((2, 4), (1800, 2600), 100, 41_000, True),
        ((16, 32), (1000, 1001), 31, 1000, True),  # rounded down
        ((2, 4), (400, 1600), 100, 1_000_000, True),  # the square of the batch
        ((2, 4), (1600, 800), 100, 800, False),  # shrinks: stays
        ((2, 4, 8), (200, 400, 800), 100, 10_000, True),
        ((2, 4, 8), (12_000, 48_000, 192_000), 100, 30_000_000, True),
        ((2, 4, 8), (24_000, 76_000, 264_000), 100, 35_500_000, True),  # 3,500 b * b + 5,000 b
        ((50, 100, 200), (500_000, 800_000, 800_000), 300, 800_000, False),  # stops growing
        ((50, 100, 200), (500_000, 900_000, 1_000_000), 300, 1_100_000, False),  # bends down
    ],
)
def test_sizes_go_on_as_they_began(batch_sizes, sizes, at, expected, believed):
    polynomial, is_believed = fit(batch_sizes, sizes)

    assert (polynomial.at(at), is_believed) == (expected, believed)
    assert [polynomial.at(size) for size in batch_sizes[-2:]] == list(sizes[-2:]) or not believed


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (0, {}, 512),
        (1, {}, 512),
        (512, {}, 512),
        (513, {}, 1024),
        (5 * MIB + 1, {}, 5 * MIB + 512),
        (1100, {"divisions": (4,) * 16}, 1536),
        (1200 * 1024, {"divisions": (4,) * 16}, 1280 * 1024),
        (4 * MIB, {"divisions": (4,) * 16}, 4 * MIB),
        (1300 * 1024, {"divisions": (4, 8) + (0,) * 14}, 1536 * 1024),
        (2100 * 1024, {"divisions": (4, 8) + (0,) * 14}, 2304 * 1024),
        (5000 * 1024 + 1, {"divisions": (4, 8) + (0,) * 14}, 5000 * 1024 + 512),
    ],
)
def test_requests_are_rounded_as_the_allocator_does(size, options, expected):
    assert rounded(size, Allocator(**options)) == expected


@pytest.mark.parametrize(
    ("order", "sizes", "options", "expected"),
    [
        ([0], [100], {}, (512, 2 * MIB)),  # a small request takes a small segment
        ([0], [3 * MIB], {}, (3 * MIB, 20 * MIB)),  # a middling one a large segment
        ([0], [11 * MIB], {}, (12 * MIB, 12 * MIB)),  # a large one its own, rounded to 2 MiB
        ([0], [3 * MIB], {"large_segment_bytes": 40 * MIB}, (3 * MIB, 40 * MIB)),
        ([0, 1], [MIB, 100], {}, (MIB + 512, 2 * MIB)),  # both from one small segment
        ([0, 1], [MIB, 3 * MIB], {}, (4 * MIB, 22 * MIB)),  # pools do not mix
        ([0, ~0, 1], [12 * MIB, 11 * MIB + MIB // 2], {}, (12 * MIB, 12 * MIB)),  # a rest of half a MiB is not cut off
        ([0, ~0, 1, 2], [20 * MIB, 8 * MIB, 8 * MIB], {}, (20 * MIB, 20 * MIB)),  # cut in two
        ([0, 1, ~0, ~1, 2], [8 * MIB, 8 * MIB, 16 * MIB], {}, (16 * MIB, 20 * MIB)),  # joined again
        ([0, 1, 2, ~0, ~2, 3], [6 * MIB, 6 * MIB, 6 * MIB, 9 * MIB], {}, (18 * MIB, 40 * MIB)),  # not over a neighbour
        ([0, ~0, 1], [40 * MIB, 8 * MIB], {"max_split_bytes": 32 * MIB}, (40 * MIB, 60 * MIB)),  # kept whole
        ([0, ~0, 1], [70 * MIB, 40 * MIB], {"max_split_bytes": 32 * MIB}, (70 * MIB, 110 * MIB)),  # too large for it
        ([0, ~0, 1], [50 * MIB, 40 * MIB], {"max_split_bytes": 32 * MIB}, (50 * MIB, 50 * MIB)),  # within 20 MiB
        ([0], [3 * MIB], {"expandable": True}, (3 * MIB, 20 * MIB)),
        ([0, 1], [15 * MIB, 15 * MIB], {"expandable": True}, (30 * MIB, 40 * MIB)),  # it grows
        ([0, ~0, 1], [15 * MIB, 25 * MIB], {"expandable": True}, (25 * MIB, 40 * MIB)),  # behind what is free
    ],
)
def test_segments_are_taken_cut_and_joined(order, sizes, options, expected):
    assert outcome(order, sizes, allocator=Allocator(**options)) == Outcome(True, *expected)


@pytest.mark.parametrize(
    ("order", "sizes", "limit", "options", "fits"),
    [
        ([0], [40 * MIB], 40 * MIB, {}, True),
        ([0], [40 * MIB], 39 * MIB, {}, False),
        ([0, ~0, 1], [40 * MIB, 50 * MIB], 50 * MIB, {}, True),  # what is cached is given back first
        ([0, 1, ~0, 2], [10 * MIB, 10 * MIB, 12 * MIB], 24 * MIB, {}, True),  # whole segments only
        ([0, 1, ~0, 2], [8 * MIB, 8 * MIB, 12 * MIB], 24 * MIB, {}, False),  # half of one is in use
        ([0, 1, ~0, 2], [20 * MIB, 15 * MIB, 22 * MIB], 60 * MIB, {"expandable": True}, True),  # pages are unmapped
        ([0], [40 * MIB], 80 * MIB, {"allowed_bytes": 39 * MIB}, False),  # the process's own limit
    ],
)
def test_memory_runs_out_only_when_nothing_can_be_given_back(order, sizes, limit, options, fits):
    assert outcome(order, sizes, limit, allocator=Allocator(**options)).fits is fits


def test_a_replay_starts_from_what_is_held():
    held = Segment(0, 0, False, False, (Block(8 * MIB, False, 2), Block(12 * MIB, True)))

    assert outcome([0], [10 * MIB], segments=(held,)) == Outcome(True, 18 * MIB, 20 * MIB)
    assert outcome([~2, 0, 1], [10 * MIB, 9 * MIB], segments=(held,)) == Outcome(
        True, 20 * MIB, 20 * MIB
    )  # a rest of 1 MiB stays


def test_pools_are_apart():
    trace = dataclasses.replace(trace_of([0, ~0, 1], [8 * MIB, 8 * MIB], allocator=Allocator()), pools=(0, 1))

    assert Replay(trace, [Polynomial(0, 0, 8 * MIB, 1)] * 2).run(1) == Outcome(True, 8 * MIB, 40 * MIB)


def test_without_an_allocator_the_sum_counts():
    held = Segment(0, 0, False, False, (Block(50, False, 2), Block(7, False)))

    assert outcome([0, ~2, 1, ~0], [100, 30], allocator=None, segments=(held,)) == Outcome(True, 157, 157)
    assert outcome([0, ~2, 1, ~0], [100, 30], 156, allocator=None, segments=(held,)).fits is False


# A step that makes a state (0) in its first run, and a gradient (1, 3) that the next run frees.
FIRST = [0, 1]
LATER = [~1, 2, 3, ~2]


@pytest.mark.parametrize(
    ("order", "sizes", "ends", "steps", "expected"),
    [
        (FIRST + LATER, [8, 9, 5, 9], [2, 6], 2, FIRST + LATER),
        (FIRST + LATER, [8, 9, 5, 9], [2, 6], 3, [*FIRST, *LATER, ~3, 4, 5, ~4]),
        (FIRST + LATER, [8, 9, 5, 9], [2, 6], 4, [*FIRST, *LATER, ~3, 4, 5, ~4, ~5, 6, 7, ~6]),
        ([0, ~0], [8], [2], 3, [0, ~0, 1, ~1, 2, ~2]),
        (FIRST, [8, 9], [2], 3, None),  # the second run will free what this one left
        (FIRST + LATER, [8, 9, 5, 10], [2, 6], 3, None),  # leaves more than it found
        ([0, 1, 2], [8, 8, 8], [1, 2], 3, None),  # grows with every step
        ([0, ~0, 1, ~1, ~2], [8, 8], [2, 5], 3, None),  # frees what was there before, which it can't do again
        ([~1, 0, ~0], [8], [3], 2, None),
    ],
)
def test_a_last_step_that_leaves_what_it_found_is_repeated(order, sizes, ends, steps, expected):
    extended = extend(trace_of(order, sizes, ends=ends), steps)

    assert (extended and list(extended.order)) == expected
    if extended is not None:
        assert len(extended.ends) == steps
        assert len(extended.sizes) == len(extended.pools) == 1 + max(extended.order)
        assert extended.sizes[: len(sizes)] == tuple(sizes)


def test_what_was_held_is_numbered_after_the_repeated_steps():
    held = Segment(0, 0, False, False, (Block(512, False, 2),))

    extended = extend(trace_of([0, ~2, ~0, 1, ~1], [8, 8], ends=[3, 5], segments=(held,)), 3)

    assert extended.order == (0, ~3, ~0, 1, ~1, 2, ~2)
    assert extended.segments[0].blocks[0].freed_as == 3


def test_a_replay_follows_the_largest_traces_that_lie_apart():
    traces = [
        trace_of([0], [size], batch_size=batch) for batch, size in ((2, 200), (50, 5000), (98, 9000), (100, 10_000))
    ]

    replay = Replay.from_traces(traces)

    assert replay.trace.batch_size == 100
    assert replay.run(200).allocated_bytes == 20_000  # not on a line through 98 and 100


def test_new_allocations_are_taken_to_grow_in_proportion():
    small = [
        trace_of([0, 1, 2, 3, 4, 5], [size * b for size in (10, 20, 30, 40, 50, 60)], batch_size=b) for b in (2, 4)
    ]
    sizes = [100, 200, 7, 300, 400, 500, 600]
    larger = trace_of([0, 1, 2, 3, 4, 5, 6], sizes, batch_size=10)

    replay = Replay.from_traces(small).adopt(larger)

    assert replay.guessed == 1
    assert replay.run(10).allocated_bytes == sum(sizes)
    assert replay.run(100).allocated_bytes == 10 * sum(sizes)


def test_the_largest_size_is_found_from_any_guess():
    replay = Replay(trace_of([0], [1]), [Polynomial(0, 1000, 500, 1)])

    for guess in (1, 50, 98, 99, 100, 5000):
        assert replay.largest(2**40, 99_999, guess) == 99
    assert replay.largest(2**40, 400, 10) == 0
    assert replay.largest(2**40, 99_999, 64, unit=8) == 96


def test_a_size_that_fits_above_one_that_does_not_is_found():
    class Holed(Replay):
        def run(self, batch_size, limit_bytes=0):
            return Outcome(batch_size in (*range(36), 37), 0, 0)

    assert Holed(trace_of([0], [1]), [Polynomial(0, 1, 0, 1)]).largest(1, 1, 4) == 37


CONFIGURATIONS = [
    "",
    "max_split_size_mb:32",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,64:2,>:4]",
    "large_segment_size_mb:40",
    "expandable_segments:True",
    "expandable_segments:True,large_segment_size_mb:40",
    "garbage_collection_threshold:0.5",
]
PROGRAM = str(Path(__file__).with_name("allocator_program.py"))


@needs_fake_gpu
@pytest.mark.parametrize("capacity", ["700MiB", "1200MiB"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_replays_of_random_programs_agree_with_the_allocator_to_the_byte(configuration, capacity):
    fraction = "0.8" if "garbage" in configuration else "1"  # without a limit of its own a process collects nothing

    done = child_on_fake_gpu([PROGRAM, "0", "40", fraction], capacity, variables={"PYTORCH_ALLOC_CONF": configuration})

    assert done.returncode == 0, done.stderr[-2000:]
    *differing, summary = done.stdout.splitlines()
    assert differing == []
    assert int(summary.split()[2]) > 10  # ran out, so that giving back was tried


@needs_fake_gpu
@pytest.mark.parametrize("configuration", ["", "expandable_segments:True"])
def test_where_memory_fragments_the_answer_is_the_true_maximum(configuration):
    printed = run_on_fake_gpu(
        """
        import torch
        from oomguard import Input, fit_batch

        torch.zeros(1, device="cuda")

        @fit_batch(inputs={"x": Input(1024)}, device="cuda", headroom=0)
        def step(x):
            # Each temporary is a little larger than all before, so that nothing cached fits.
            for i in range(1, 13):
                torch.empty(len(x) * i * 65536, device="cuda")

        @fit_batch(inputs=step._self_plan.inputs, device="cuda", headroom=0, search="bisect")
        def same(x):
            for i in range(1, 13):
                torch.empty(len(x) * i * 65536, device="cuda")

        found, true = step.probe(), same.probe()
        largest = next(t for t in found.trials if t.batch_size == found.batch_size and t.steps == 3)
        print(found.batch_size, true.batch_size, sum(not t.passed for t in found.trials),
              largest.peak_reserved_bytes / largest.peak_allocated_bytes)
        """,
        "4GiB",
        variables={"PYTORCH_ALLOC_CONF": configuration},
    )

    answer, true, misses, ratio = printed.split()
    assert (answer, misses) == (true, "0")
    assert float(ratio) > 1.0
