"""Where traces come from: the allocator's history, and what a meter counts."""

import pytest
import torch
from fakes import needs_fake_gpu, run_on_fake_gpu

from oomguard.memory.storages import StorageMeter
from oomguard.memory.trace import NEVER, Allocator, Block, Segment, StorageHistory, read_history, read_settings

MIB = 2**20
SEGMENT = {"address": 1000, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0)}


def event(action, address=0, size=0, **more):
    return {"action": action, "addr": address, "size": size, "stream": 0, "pool_id": (0, 0), **more}


def test_events_become_numbers_and_sizes():
    held = {**SEGMENT, "blocks": [{"size": 512, "state": "active_allocated"}, {"size": 1024, "state": "inactive"}]}
    events = [
        event("free_completed", 5000, 30),  # asked for before
        event("alloc", 7000, 40),
        event("segment_alloc", 9000, 2 * MIB),
        event("alloc", 9000, 60, stream=5),
        event("free_requested", 7000, 40),
        event("free_completed", 7000, 40),
        event("alloc", 7000, 50),  # the same address again
        event("free_completed", 1000, 512),  # what was there before
        event("free_completed", 7000, 50),
        event("alloc", 7000, 70),  # after the end
    ]

    trace = read_history(3, events, [6, 9], [held], Allocator())

    assert trace.batch_size == 3
    assert trace.order == (0, 1, ~0, 2, ~3, ~2)
    assert trace.sizes == (40, 60, 50)
    assert trace.pools == (0, 1, 0)
    assert trace.ends == (3, 6)
    assert trace.segments == (Segment(1000, 0, True, False, (Block(512, False, 3), Block(1024, True))),)


def test_a_segment_that_grows_begins_where_it_was_first_mapped():
    events = [
        event("segment_map", 100 * MIB, 20 * MIB),
        event("segment_unmap", 100 * MIB, 20 * MIB),
        event("segment_map", 10 * MIB, 20 * MIB),  # another one
        event("alloc", 100 * MIB, 40),
    ]

    trace = read_history(1, events, [4], [], Allocator(expandable=True))

    assert trace.segments == (Segment(100 * MIB, 0, False, True, ()),)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Allocator()),
        ({"max_split_size": -1, "expandable_segments": True}, Allocator(expandable=True)),
        ({"max_split_size": 64 * MIB}, Allocator(max_split_bytes=64 * MIB)),
        ({"garbage_collection_threshold": 0.5}, Allocator(collect_above=0.5)),
        ({"roundup_power2_divisions": {"2": 8, "1": 4, "16": 2}}, Allocator(divisions=(4, 8, 2))),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:40, max_non_split_rounding_mb:30"},
            Allocator(large_segment_bytes=40 * MIB, oversize_bytes=30 * MIB),
        ),
    ],
)
def test_settings_are_read_from_a_snapshot(settings, expected):
    assert read_settings(settings) == expected
    assert Allocator().max_split_bytes == NEVER


def test_a_meters_history_holds_what_was_there_and_when_steps_ended():
    meter = StorageMeter()
    with meter:
        before = torch.ones(100)
        history = StorageHistory(meter, held_bytes=1000)
        x = torch.ones(10)
        y = x + 1
        del x
        history.step_ended()
        del before
        z = y * 2
        history.step_ended()
        del y, z
        trace = history.close(10)

    assert trace.order == (0, 1, ~0, ~3, 2)
    assert trace.sizes == (40, 40, 40)
    assert trace.ends == (3, 5)
    assert [block for segment in trace.segments for block in segment.blocks] == [
        Block(1000, False),
        Block(400, False, 3),
    ]
    assert trace.allocator is None
    assert meter.history is None


def test_a_storage_that_grows_is_a_new_block_beside_the_old_one():
    meter = StorageMeter()
    with meter:
        history = StorageHistory(meter)
        x = torch.ones(10)
        x.resize_(100)
        history.step_ended()
        trace = history.close(10)

    assert trace.order == (0, 1, ~1, ~0, 2)
    assert trace.sizes == (40, 400, 400)


def test_a_history_without_a_step_is_no_trace():
    assert StorageHistory(StorageMeter()).close(1) is None


@needs_fake_gpu
def test_the_allocators_history_is_read_and_one_that_the_user_records_is_left_as_it_was():
    printed = run_on_fake_gpu(
        """
        import torch
        from oomguard.memory.trace import AllocatorHistory

        device = torch.device("cuda", 0)
        weight = torch.ones(1000, 1000, device=device)

        def trace():
            history = AllocatorHistory(device)
            for _ in range(2):
                x = torch.ones(300, device=device)
                y = x * 2
                history.step_ended()
            return history.close(300)

        def recorded():
            return [e["size"] for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] == "alloc"]

        first = trace()
        print(first.order, first.sizes, first.ends, torch._C._cuda_isHistoryEnabled(), recorded())
        torch.cuda.memory._record_memory_history(max_entries=1000)
        mine = torch.ones(5, device=device)
        second = trace()
        print(second.order == first.order, torch._C._cuda_isHistoryEnabled(), recorded()[0], len(recorded()))
        torch.cuda.memory._record_memory_history(max_entries=3)
        print(trace())  # older events were pushed out
        """
    )

    assert printed.splitlines() == [
        "(0, 1, 2, ~0, 3, ~1)".replace("~0", "-1").replace("~1", "-2") + " (1200, 1200, 1200, 1200) (2, 6) False []",
        "True True 20 5",
        "None",
    ]
