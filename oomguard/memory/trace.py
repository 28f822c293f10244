"""
The allocations of one run of a step, in order: what a replay needs to know.

On devices with PyTorch's caching allocator they are read from its own history;
elsewhere a `StorageMeter` keeps them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomguard.memory.storages import StorageMeter

MIB = 2**20
_SMALL_SEGMENT_BYTES = 2 * MIB
NEVER = sys.maxsize  # a threshold that nothing reaches


@dataclass(frozen=True)
class Allocator:
    """
    The settings of PyTorch's caching allocator, as `PYTORCH_ALLOC_CONF` has them.

    Attributes:
        max_split_bytes: Blocks of at least this size are not split.
        oversize_bytes: By how much a block that is not split may exceed the request.
        divisions: Into how many parts each power of two is cut when sizes are
            rounded, from 1 MiB on; 0: sizes are rounded to 512 bytes.
        large_segment_bytes: What is taken from the device for requests of 1 to 10 MiB.
        expandable: Segments grow, and give back their free pages.
        collect_above: The fraction of *allowed_bytes* above which old cached blocks
            are given back; 0: never.
        allowed_bytes: What `set_per_process_memory_fraction` allows; None: no such limit.
    """

    max_split_bytes: int = NEVER
    oversize_bytes: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * 16
    large_segment_bytes: int = 20 * MIB
    expandable: bool = False
    collect_above: float = 0.0
    allowed_bytes: int | None = None


@dataclass(frozen=True)
class Block:
    """A piece of a segment: free, or held and, where the trace frees it, the number that it has there."""

    size_bytes: int
    is_free: bool
    freed_as: int | None = None


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator had taken from the device before; without blocks: where one that grows begins."""

    address: int
    pool: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Trace:
    """
    What one run of a step allocated and freed, in order.

    Attributes:
        batch_size: Items in the step's batch.
        order: k for allocation number k, and ~k for its free. Numbers from
            `len(sizes)` on stand for what was there before, in the order of being freed.
        sizes: The bytes that each allocation asked for.
        pools: For each allocation the number of its pool: a stream, or a pool of its own.
        ends: For each step, the length of *order* when it ended.
        segments: What the allocator had taken from the device before.
        allocator: Its settings; None: there is no cache, every allocation counts as it is.
    """

    batch_size: int
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    pools: tuple[int, ...]
    ends: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    allocator: Allocator | None = None


class AllocatorHistory:
    """
    Record the events of CUDA's caching allocator on one device.

    Args:
        device: A CUDA or ROCm device, with its number.

    Note:
        Where the user records a history already, it is read and left as it was.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_ours = not torch._C._cuda_isHistoryEnabled()
        if self._is_ours:
            torch.cuda.memory._record_memory_history(context=None, max_entries=_MOST_EVENTS)
        self._before = torch.cuda.memory._snapshot()
        self._first = self._counts()
        self._ends: list[int] = []  # in events that are counted

    def step_ended(self) -> None:
        """Note that a step has ended here."""
        self._ends.append(sum(self._counts()) - sum(self._first))

    def close(self, batch_size: int) -> Trace | None:
        """Stop recording, and return the trace of the steps that have ended; None: there is no complete one."""
        made, freed = (now - then for now, then in zip(self._counts(), self._first, strict=True))
        events = torch.cuda.memory._snapshot()["device_traces"][self._device.index] if self._ends else []
        if self._is_ours:
            torch.cuda.memory._record_memory_history(enabled=None)
        counted = [i for i, event in enumerate(events) if event["action"] in _COUNTED]
        older = len(counted) - made - freed  # are the user's
        mine = counted[max(0, older) :]
        if not self._ends or sum(events[i]["action"] == "alloc" for i in mine) != made:
            return None  # newer events have pushed out older ones
        begin = counted[older - 1] + 1 if older > 0 else 0
        if older > 0 and begin < len(events) and events[begin]["action"] == "free_completed":
            begin += 1  # of the request before
        ends = [mine[end] if end < len(mine) else len(events) for end in self._ends]
        segments = [each for each in self._before["segments"] if each["device"] == self._device.index]
        return read_history(batch_size, events[begin:], [end - begin for end in ends], segments, self._settings())

    def _counts(self) -> tuple[int, int]:
        """Return how many allocations and how many requests to free there were so far."""
        count = torch.cuda.memory_stats_as_nested_dict(self._device)["allocation"]["all"]
        return int(count["allocated"]), int(count["freed"])

    def _settings(self) -> Allocator:
        fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        total = torch.cuda.mem_get_info(self._device)[1]
        return read_settings(
            self._before.get("allocator_settings", {}), int(fraction * total) if fraction < 1 else None
        )


_COUNTED = {"alloc", "free_requested"}
_MOST_EVENTS = 2_000_000  # a longer trace would take long to read, and is given up


class StorageHistory:
    """
    Record what a meter counts.

    Args:
        meter: The meter, which is entered while steps run.
        allocator: The settings of the device's allocator; None: it has no cache.
        held_bytes: What the device holds already and the meter has not counted.
    """

    def __init__(self, meter: StorageMeter, allocator: Allocator | None = None, held_bytes: int = 0) -> None:
        self._meter, self._allocator = meter, allocator
        held = [(0, held_bytes)] * (held_bytes > 0)
        self._held = [*held, *meter.start_history()]
        self._ends: list[int] = []

    def step_ended(self) -> None:
        """Note that a step has ended here."""
        self._ends.append(len(self._meter.history or ()))

    def close(self, batch_size: int) -> Trace | None:
        """Stop recording, and return the trace of the steps that have ended; None: there is none."""
        history = self._meter.stop_history()
        if not self._ends:
            return None
        events = [{"action": action, "addr": address, "size": size, "stream": 0} for action, address, size in history]
        segments = [
            {"address": address, "stream": 0, "segment_type": "large", "blocks": [{"size": size, "state": "active"}]}
            for address, size in self._held
        ]
        return read_history(batch_size, events, self._ends, segments, self._allocator)


def read_settings(settings: Mapping[str, Any], allowed_bytes: int | None = None) -> Allocator:
    """
    Return the settings that a snapshot of the allocator names.

    Args:
        settings: `torch.cuda.memory._snapshot()["allocator_settings"]`.
        allowed_bytes: What the process may take by its own limit.

    Example:
        >>> read_settings({"max_split_size": 64 * MIB, "expandable_segments": False}).max_split_bytes
        67108864
    """
    # Two options are known by their text alone.
    text = str(settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    options = {name: int(value) * MIB for name, value in re.findall(r"(\w+_mb)\s*:\s*(\d+)", text)}
    max_split = int(settings.get("max_split_size", -1))
    divisions = settings.get("roundup_power2_divisions", {})
    return Allocator(
        max_split_bytes=max_split if max_split > 0 else NEVER,
        oversize_bytes=options.get("max_non_split_rounding_mb", Allocator.oversize_bytes),
        divisions=tuple(int(count) for _, count in sorted(divisions.items(), key=lambda item: int(item[0])))
        or Allocator.divisions,
        large_segment_bytes=options.get("large_segment_size_mb", Allocator.large_segment_bytes),
        expandable=bool(settings.get("expandable_segments", False)),
        collect_above=float(settings.get("garbage_collection_threshold", 0.0)),
        allowed_bytes=allowed_bytes,
    )


def read_history(
    batch_size: int,
    events: Sequence[Mapping[str, Any]],
    ends: Sequence[int],
    segments: Iterable[Mapping[str, Any]],
    allocator: Allocator | None,
) -> Trace:
    """
    Return the trace that a history tells.

    Args:
        batch_size: Items in the step's batch.
        events: The allocator's events, as `torch.cuda.memory._snapshot()` has them.
        ends: For each step, how many events there were when it ended.
        segments: What was held before, as the same function has it.
        allocator: The allocator's settings.
    """
    events, segments = events[: ends[-1]], list(segments)
    there = {address for segment in segments for address, block in _blocks(segment) if block["state"] != "inactive"}
    sizes = tuple(event["size"] for event in events if event["action"] == "alloc")
    pools: list[int] = []
    order: list[int] = []
    lengths = [0]  # of the order, after each event
    numbers: dict[int, int] = {}  # of what is allocated, by address
    held: dict[int, int] = {}  # of what was there before and is freed, by address
    known: dict[object, int] = {}  # pools, by what tells them apart
    begins: dict[tuple[int, bool], int] = {}  # of segments that grow, by pool and smallness
    moved: set[int] = set()  # pools
    for event in events:
        if event["action"] == "alloc":
            numbers[event["addr"]] = len(pools)
            order.append(len(pools))
            pools.append(known.setdefault((event.get("pool_id", (0, 0)), event["stream"]), len(known)))
        elif event["action"] == "free_completed":
            number = numbers.pop(event["addr"], None)
            if number is None and event["addr"] not in there:  # asked for before
                lengths.append(len(order))
                continue
            if number is None:
                number = held[event["addr"]] = len(sizes) + len(held)
            order.append(~number)
        elif event["action"] in {"segment_map", "segment_unmap"}:
            pool = known.setdefault((event.get("pool_id", (0, 0)), event["stream"]), len(known))
            if event["action"] == "segment_unmap":
                moved.add(pool)  # what is wholly unmapped begins elsewhere the next time
            elif pool not in moved:  # it may be below all that was mapped before
                place = pool, event["size"] == _SMALL_SEGMENT_BYTES
                begins[place] = min(event["addr"], begins.get(place, event["addr"]))
        lengths.append(len(order))
    return Trace(
        batch_size=batch_size,
        order=tuple(order),
        sizes=sizes,
        pools=tuple(pools),
        ends=tuple(lengths[end] for end in ends),
        segments=(
            *(_segment(segment, held, known) for segment in segments),
            *(
                Segment(begin, pool, is_small, is_expandable=True, blocks=())
                for (pool, is_small), begin in begins.items()
            ),
        ),
        allocator=allocator,
    )


def _blocks(segment: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block
        address += block["size"]


def _segment(segment: Mapping[str, Any], held: Mapping[int, int], known: dict[object, int]) -> Segment:
    blocks = (Block(each["size"], each["state"] == "inactive", held.get(at)) for at, each in _blocks(segment))
    return Segment(
        address=segment["address"],
        pool=known.setdefault((segment.get("segment_pool_id", (0, 0)), segment["stream"]), len(known)),
        is_small=segment["segment_type"] == "small",
        is_expandable=segment.get("is_expandable", False),
        blocks=tuple(blocks),
    )
