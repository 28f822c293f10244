"""
What a step would need at any batch size: its trace with other sizes, run through the allocator's rules.

On one device the sizes of a step's allocations are polynomials in the batch size,
and their order does not change with it. So a few small traces tell the trace of
any size, and replaying it says what is allocated, what is reserved, and whether
memory runs out. The peak itself must not be extrapolated: it moves to other
places in the step as the batch grows.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from oomguard.memory.trace import NEVER, Allocator, Segment, Trace

_PAGE = 512  # bytes; all sizes below are counted in it
_SMALL = 2**20 // _PAGE  # requests up to here come from small segments
_SMALL_SEGMENT = 2 * 2**20 // _PAGE
_OWN_SEGMENT = 10 * 2**20 // _PAGE  # requests from here on get a segment of their own size, rounded
_ROUND = 2 * 2**20 // _PAGE
_SHIFT = 44  # a free block is one integer, size << 44 | address: they sort as the allocator's do
_ADDRESS = (1 << _SHIFT) - 1
_SPAN = 1 << 35  # pages of a segment that grows, more than any device has
_LARGEST = 2**40  # a step that fits with so many items does not grow with them
_POINTS = 3  # traces through which sizes are fitted
_APART = 0.95  # of one of them, at most, has the next one
_FARTHEST = 64  # new allocations in a row that are looked over
_ALIKE = 4  # allocations in a row whose sizes are as expected, so that they are the same
_BEYOND = 8  # sizes looked at above one that does not fit


@dataclass(frozen=True)
class Polynomial:
    """A size in bytes as (square * b * b + linear * b + constant) / divisor, rounded down."""

    square: int
    linear: int
    constant: int
    divisor: int

    def at(self, batch_size: int) -> int:
        """Return the size at *batch_size*."""
        return max(0, ((self.square * batch_size + self.linear) * batch_size + self.constant) // self.divisor)


@dataclass(frozen=True)
class Outcome:
    """What a replay ended with: whether it came to its end, and its peaks until then."""

    fits: bool
    allocated_bytes: int
    reserved_bytes: int


class Replay:
    """
    Run a step at sizes that it has not run at; made by `from_traces`.

    Args:
        trace: The trace whose order is replayed.
        growth: For each of its allocations, how the size grows with the batch.
        guessed: How many of these are guesses: no polynomial fits, or there is only
            one point.
    """

    def __init__(self, trace: Trace, growth: Sequence[Polynomial], guessed: int = 0) -> None:
        self.trace, self.guessed = trace, guessed
        kinds = {polynomial: i for i, polynomial in enumerate(dict.fromkeys(growth))}
        self._polynomials = list(kinds)
        self._kinds = [kinds[polynomial] for polynomial in growth]

    @classmethod
    def from_traces(cls, traces: Sequence[Trace]) -> Replay:
        """Return the replay of two traces or more that agree in their allocations; it has the order of the largest."""
        used: list[
            Trace
        ] = []  # the largest ones that lie apart: what rounding does would tilt a line through two others
        for trace in sorted(traces, key=lambda trace: -trace.batch_size):
            if len(used) < _POINTS and (not used or trace.batch_size <= _APART * used[0].batch_size):
                used.insert(0, trace)
        if len(used) == 1:
            used = sorted(traces, key=lambda trace: trace.batch_size)[-2:]
        sizes = [trace.batch_size for trace in used]
        points = list(zip(*(trace.sizes for trace in used), strict=True))
        fitted = {point: fit(sizes, point) for point in dict.fromkeys(points)}
        return cls(used[-1], [fitted[point][0] for point in points], sum(not fitted[point][1] for point in points))

    def adopt(self, trace: Trace) -> Replay:
        """
        Return the replay of a larger *trace* in which some allocations are new.

        Allocations that have the size expected of them go on growing as they did; the
        new ones between them are taken to grow in proportion to the batch.
        """
        expected = tuple(self._sizes(trace.batch_size))
        growth = [Polynomial(0, size, 0, trace.batch_size) for size in trace.sizes]
        known = [False] * len(growth)
        for i, k in _aligned(expected, trace.sizes):
            growth[k], known[k] = self._polynomials[self._kinds[i]], True
        return Replay(trace, growth, known.count(False))

    def on(self, allocator: Allocator) -> Replay:
        """Return the same replay with the rules of another *allocator*."""
        trace = dataclasses.replace(self.trace, allocator=allocator)
        return Replay(trace, [self._polynomials[kind] for kind in self._kinds], self.guessed)

    def _sizes(self, batch_size: int) -> list[int]:
        values = [polynomial.at(batch_size) for polynomial in self._polynomials]
        return [values[kind] for kind in self._kinds]

    def run(self, batch_size: int, limit_bytes: int = NEVER) -> Outcome:
        """
        Replay the step.

        Args:
            batch_size: Items, of any number.
            limit_bytes: What the process may take from the device.
        """
        allocator = self.trace.allocator
        if allocator is None:
            return _count(self.trace, self._sizes(batch_size), limit_bytes)
        pages = [rounded(polynomial.at(batch_size), allocator) // _PAGE for polynomial in self._polynomials]
        cache = _Expandable if allocator.expandable else _Cache
        return cache(self.trace, allocator, limit_bytes).run([pages[kind] for kind in self._kinds])

    def largest(self, limit_bytes: int, budget_bytes: int, guess: int, unit: int = 1) -> int:
        """
        Return the largest batch size that comes to its end and reserves no more than a budget; 0: none does.

        Args:
            limit_bytes: What the process may take from the device.
            budget_bytes: What it should.
            guess: Where to begin.
            unit: Sizes are multiples of it.

        Note:
            A size that fits may lie above one that does not, since cached segments fit or
            do not fit. So a few sizes above the first that does not fit are looked at, too.
        """

        def fits(count: int) -> bool:
            outcome = self.run(count * unit, limit_bytes)
            return outcome.fits and outcome.reserved_bytes <= budget_bytes

        low, high, stride = guess // unit, guess // unit + 1, 1
        if fits(low):
            while fits(high) and high < _LARGEST:
                stride *= 2
                low, high = high, high + stride
        else:
            while low > 0 and not fits(low):
                stride *= 2
                low, high = max(0, low - stride), low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return unit * max([low, *(size for size in range(high + 1, high + _BEYOND) if fits(size))])


def _aligned(left: Sequence[int], right: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the places at which two sequences are the same, but for a few items that either has more."""
    i = k = 0
    while i < len(left) and k < len(right):
        if left[i] == right[k]:
            yield i, k
            i, k = i + 1, k + 1
            continue
        for skipped in range(1, _FARTHEST):  # where they meet again: after items of one, the other, or both
            ahead = [(i, k + skipped), (i + skipped, k), (i + skipped, k + skipped)]
            met = next(((a, b) for a, b in ahead if left[a : a + _ALIKE] == right[b : b + _ALIKE]), None)
            if met is not None:
                i, k = met
                break
        else:
            i, k = i + 1, k + 1


def extend(trace: Trace, steps: int) -> Trace | None:
    """
    Return *trace* with its last step repeated until there are so many *steps*; None: it would not repeat.

    A step repeats where it leaves behind as much as it has found left by the one before:
    then the next frees what this one has left, as this one freed what the last one left.
    """
    missing = steps - len(trace.ends)
    if missing <= 0:
        return trace
    begin = trace.ends[-2] if len(trace.ends) > 1 else 0
    last = trace.order[begin:]
    count = len(trace.sizes)
    first = next((number for number in last if number >= 0), count)  # its allocations are the last ones
    freed = {~number for number in last if number < 0}
    found = sorted(number for number in freed if number < first or number >= count)
    left = [number for number in range(first, count) if number not in freed]
    if len(found) != len(left) or any(number >= count for number in found):
        return None
    if [trace.sizes[number] for number in found] != [trace.sizes[number] for number in left]:
        return None
    heir = dict(zip(found, left, strict=True))
    own = count - first
    order, ends = list(trace.order), list(trace.ends)
    for i in range(missing):
        for number in last:
            freed_number = ~number
            if number >= 0:
                order.append(number + (i + 1) * own)
            elif freed_number in heir:
                order.append(~(heir[freed_number] + i * own))
            else:
                order.append(~(freed_number + (i + 1) * own))
        ends.append(len(order))
    added = missing * own
    return dataclasses.replace(
        trace,
        order=tuple(
            ~(~n + added) if n < 0 and ~n >= count and i < len(trace.order) else n for i, n in enumerate(order)
        ),
        sizes=trace.sizes + trace.sizes[first:] * missing,
        pools=trace.pools + trace.pools[first:] * missing,
        ends=tuple(ends),
        segments=tuple(_renumbered(segment, added) for segment in trace.segments),
    )


def _renumbered(segment: Segment, added: int) -> Segment:
    blocks = (
        block if block.freed_as is None else dataclasses.replace(block, freed_as=block.freed_as + added)
        for block in segment.blocks
    )
    return dataclasses.replace(segment, blocks=tuple(blocks))


def fit(batch_sizes: Sequence[int], sizes: Sequence[int]) -> tuple[Polynomial, bool]:
    """
    Return the polynomial through the sizes of one allocation, and whether it is one to believe in.

    In proportion where it can be; with the square of the batch where the constant
    would be negative; along a parabola where a third point is not on the line of the
    last two. What bends down, or shrinks, is none of these: it goes on as from the last
    two points, or stays.

    Args:
        batch_sizes: Two or three, growing.
        sizes: The allocation's size at each, in bytes.

    Example:
        >>> fit([2, 4], [1800, 2600])[0].at(100)
        41000
        >>> fit([2, 4], [400, 1600])[0].at(100)
        1000000
    """
    a, b = batch_sizes[-2:]
    x, y = sizes[-2:]
    line = Polynomial(0, y - x, x * b - y * a, b - a)
    if len(sizes) > 2:  # noqa: PLR2004 - a third point
        c, z = batch_sizes[-3], sizes[-3]
        if abs(line.at(c) - z) <= max(_PAGE, z // 1000):
            return line, True
        curve = _through((c, z), (a, x), (b, y))
        if curve.square > 0 and z <= x:
            return curve, True
        return line if x <= y else Polynomial(0, 0, y, 1), False
    if x * b < y * a and abs(x * b * b - y * a * a) * 1000 <= y * a * a:
        return Polynomial(y, 0, 0, b * b), True
    return (line, True) if x <= y else (Polynomial(0, 0, y, 1), False)


def _through(*points: tuple[int, int]) -> Polynomial:
    """Return the parabola through three points, by Lagrange's formula over a common divisor."""
    (a, x), (b, y), (c, z) = points
    divisor = (b - a) * (c - a) * (c - b)
    p, q, r = x * (c - b), -y * (c - a), z * (b - a)
    return Polynomial(
        square=p + q + r,
        linear=-(p * (b + c) + q * (a + c) + r * (a + b)),
        constant=p * b * c + q * a * c + r * a * b,
        divisor=divisor,
    )


def rounded(size_bytes: int, allocator: Allocator) -> int:
    """
    Return what the caching allocator makes of a request.

    Example:
        >>> rounded(1300, Allocator()), rounded(1300 * 2**10, Allocator(divisions=(4,) * 16))
        (1536, 1572864)

    Source:
        `round_size` in PyTorch's c10/cuda/CUDACachingAllocator.cpp.
    """
    if size_bytes < _PAGE:
        return _PAGE
    power = size_bytes.bit_length() - 1
    divisions = allocator.divisions[min(max(0, power - 20), len(allocator.divisions) - 1)]
    if divisions > 1 and size_bytes > _PAGE * divisions:
        part = (1 << power) // divisions
        return -(-size_bytes // part) * part
    return -(-size_bytes // _PAGE) * _PAGE


def _count(trace: Trace, sizes: list[int], limit_bytes: int) -> Outcome:
    """Replay where nothing is rounded and nothing kept: what is allocated is the sum of the sizes."""
    held = [block for segment in trace.segments for block in segment.blocks]
    known = {block.freed_as: block.size_bytes for block in held}
    sizes = [*sizes, *(known[number] for number in range(len(sizes), len(sizes) + len(known) - (None in known)))]
    base = sum(block.size_bytes for block in held)
    peak = max(accumulate((sizes[o] if o >= 0 else -sizes[~o] for o in trace.order), initial=base))
    return Outcome(peak <= limit_bytes, peak, peak)


class _OutOfMemory(Exception):  # noqa: N818 - within this module
    """The replay has come to an allocation that finds no room."""


class _Cache:
    """
    The caching allocator: segments from the device, cut into blocks, kept when freed.

    A free block stands in the list of its pool, in the order in which the allocator
    looks through it, and in two tables by its first page and by the page after it,
    where its neighbours find it. Segments lie apart, so that blocks of two never meet.

    Source:
        PyTorch's c10/cuda/CUDACachingAllocator.cpp.
    """

    def __init__(self, trace: Trace, allocator: Allocator, limit_bytes: int) -> None:
        self._trace, self._allocator = trace, allocator
        self._limit = limit_bytes // _PAGE
        self._allowed = NEVER if allocator.allowed_bytes is None else allocator.allowed_bytes // _PAGE
        self._max_split = allocator.max_split_bytes // _PAGE
        self._reserved = self._peak_reserved = self._allocated = 0
        self._segments: dict[int, int] = {}  # first page: pages
        self._starts: dict[int, int] = {}  # of free blocks, first page: pages
        self._ends: dict[int, int] = {}  # of free blocks, the page after: first page
        pools = 1 + max([*trace.pools, *(segment.pool for segment in trace.segments)], default=0)
        self._lists: list[list[int]] = [[] for _ in range(2 * pools)]  # of a pool the small, then the large
        self._gaps: dict[int, int] = {}  # unmapped pages of segments that grow, first page: pages
        self._next = 0  # the first page of the next segment
        self._freed_at: dict[int, int] = {}  # of free blocks, for those who look for old ones
        count = len(trace.sizes)
        held = max((b.freed_as or 0 for segment in trace.segments for b in segment.blocks), default=0)
        self._where = [0] * max(count, held + 1)
        self._got = [0] * max(count, held + 1)
        self._home: list[list[int]] = [self._lists[0]] * max(count, held + 1)
        for segment in trace.segments:
            self._load(segment)
        self._peak_reserved = self._reserved

    def _load(self, segment: Segment) -> None:
        free = self._lists[2 * segment.pool + (not segment.is_small)]
        pages = sum(block.size_bytes for block in segment.blocks) // _PAGE
        address = self._place(pages)
        for block in segment.blocks:
            size = block.size_bytes // _PAGE
            if block.is_free:
                self._put(free, address, size)
            else:
                self._allocated += size
            if block.freed_as is not None:
                self._where[block.freed_as], self._got[block.freed_as], self._home[block.freed_as] = address, size, free
            address += size

    def _place(self, pages: int) -> int:
        """Take a segment from the device."""
        address = self._next
        self._segments[address] = pages
        self._next += pages + 1
        self._reserved += pages
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        return address

    def _put(self, free: list[int], address: int, pages: int) -> None:
        self._starts[address] = pages
        self._ends[address + pages] = address
        insort(free, pages << _SHIFT | address)

    def run(self, sizes: list[int]) -> Outcome:  # noqa: PLR0915 - one flat loop: it runs over thousands of events
        """Replay with these *sizes*, in pages."""
        lists, starts, ends = self._lists, self._starts, self._ends
        where, got, home = self._where, self._got, self._home
        pools = [2 * pool for pool in self._trace.pools]
        max_split, oversize = self._max_split, self._allocator.oversize_bytes // _PAGE
        gaps = self._gaps
        least_rest = 0 if self._allocator.expandable else _SMALL  # of a large block that is split
        split_below = NEVER if self._allocator.expandable else max_split
        allocated = peak = self._allocated
        freed_at, now = self._freed_at, 0  # in requests for large blocks
        fits = True
        for number in self._trace.order:
            if number >= 0:
                size = sizes[number]
                is_large = size > _SMALL
                now += is_large
                free = lists[pools[number] + is_large]
                i = bisect_left(free, size << _SHIFT)
                block = free[i] if i < len(free) else 0
                pages, address = block >> _SHIFT, block & _ADDRESS
                end = address + pages
                if end in gaps:
                    i = self._tightest(free, i)
                    block = free[i]
                    pages, address = block >> _SHIFT, block & _ADDRESS
                    end = address + pages
                if pages >= max_split and (size < max_split or pages >= size + oversize):
                    block = 0
                if block:
                    del free[i], starts[address], ends[end]
                else:
                    try:
                        address, pages = self._new(size, free, now)
                    except _OutOfMemory:
                        fits = False
                        break
                    end = address + pages
                rest = pages - size
                if rest > (least_rest if is_large else 0) and size < split_below:
                    start = address + size
                    starts[start] = rest
                    ends[end] = start
                    insort(free, rest << _SHIFT | start)
                    pages = size
                where[number], got[number], home[number] = address, pages, free
                allocated += pages
                if allocated > peak:  # noqa: PLR1730 - a call would be slower
                    peak = allocated
            else:
                number = ~number  # noqa: PLW2901 - of the allocation that is freed
                address, pages, free = where[number], got[number], home[number]
                allocated -= pages
                end = address + pages
                if end in starts:
                    after = starts.pop(end)
                    del free[bisect_left(free, after << _SHIFT | end)]
                    end += after
                if address in ends:
                    before = ends.pop(address)
                    del free[bisect_left(free, (address - before) << _SHIFT | before)]
                    address = before
                pages = end - address
                starts[address] = pages
                ends[end] = address
                freed_at[address] = now
                insort(free, pages << _SHIFT | address)
        return Outcome(fits, peak * _PAGE, self._peak_reserved * _PAGE)

    def _new(self, size: int, free: list[int], now: int) -> tuple[int, int]:
        """Return a new segment for a request that no free block serves, giving back cached ones if it must."""
        pages = self._segment_pages(size)
        self._collect(now)
        limit = min(self._limit, self._allowed)
        if self._reserved + pages > limit and not (
            self._release_oversize(size, free) and self._reserved + pages <= limit
        ):
            self._release()
        if self._reserved + pages > limit:
            raise _OutOfMemory
        return self._place(pages), pages

    def _segment_pages(self, size: int) -> int:
        if size <= _SMALL:
            return _SMALL_SEGMENT
        if size < _OWN_SEGMENT:
            return self._allocator.large_segment_bytes // _PAGE
        return -(-size // _ROUND) * _ROUND

    def _collect(self, now: int) -> None:
        """Give back cached segments of more than the mean age, where there is a threshold and it is passed."""
        above = self._allocator.collect_above
        if not above or self._allocator.allowed_bytes is None:
            return
        target = self._reserved - int(above * self._allowed)
        whole = [(free, block) for free in self._lists[1::2] for block in free if self._is_whole(block)]
        while target > 0 and whole:
            ages = [now - self._freed_at.get(block & _ADDRESS, 0) for _, block in whole]
            old = [each for each, age in zip(whole, ages, strict=True) if age * len(ages) >= sum(ages)]
            for free, block in old:
                target -= block >> _SHIFT
                self._give_back(free, block)
            whole = [each for each in whole if each not in old]

    def _is_whole(self, block: int) -> bool:
        return self._segments.get(block & _ADDRESS) == block >> _SHIFT

    def _release_oversize(self, size: int, free: list[int]) -> bool:
        """Give back one block that would serve if it might be split, or the largest ones; tell whether that may do."""
        if self._max_split >= NEVER // _PAGE:
            return False
        wanted = max(size, self._max_split)
        i = bisect_left(free, wanted << _SHIFT)
        if i < len(free):
            self._give_back(free, free[i])
            return True
        released = 0
        while free and released < wanted and free[-1] >> _SHIFT >= self._max_split:
            released += free[-1] >> _SHIFT
            self._give_back(free, free[-1])
        return released >= wanted

    def _release(self) -> None:
        """Give back every segment that is wholly free."""
        for free in self._lists:
            for block in [block for block in free if self._is_whole(block)]:
                self._give_back(free, block)

    def _tightest(self, free: list[int], i: int) -> int:
        """Return which block serves a request that block *i* could: one at a gap counts as large as it can grow."""

        def room(block: int) -> int:
            end = (block & _ADDRESS) + (block >> _SHIFT)
            return (block >> _SHIFT) + self._gaps.get(end, 0)

        while i + 1 < len(free) and room(free[i + 1]) < room(free[i]):
            i += 1
        return i

    def _give_back(self, free: list[int], block: int) -> None:
        address, pages = block & _ADDRESS, block >> _SHIFT
        free.remove(block)
        del self._starts[address], self._ends[address + pages], self._segments[address]
        self._reserved -= pages


class _Expandable(_Cache):
    """
    The caching allocator with expandable segments: a pool has one, of which pages are mapped as needed.

    Where the pages of a pool are not mapped there is a gap. A free block that ends at
    a gap counts as large as it can grow.
    """

    def __init__(self, trace: Trace, allocator: Allocator, limit_bytes: int) -> None:
        self._origins: dict[int, int] = {}  # of pools, where their segment really begins
        for segment in trace.segments:
            index = 2 * segment.pool + (not segment.is_small)
            self._origins[index] = min(segment.address, self._origins.get(index, segment.address))
        super().__init__(trace, allocator, limit_bytes)

    def _load(self, segment: Segment) -> None:
        index = 2 * segment.pool + (not segment.is_small)
        base, granule = self._base(index), self._granule(index)
        offset = -(-(segment.address - self._origins[index]) // _PAGE // granule) * granule
        pages = sum(block.size_bytes for block in segment.blocks) // _PAGE
        if not pages:
            return
        if offset + pages > _SPAN:  # a second segment, elsewhere
            offset = max(gap for gap in self._gaps if base <= gap < base + _SPAN) - base + granule
        first = base + offset
        self._map(index, first, pages)
        address = first
        for block in segment.blocks:
            size = block.size_bytes // _PAGE
            if block.is_free:
                self._put(self._lists[index], address, size)
            else:
                self._allocated += size
            if block.freed_as is not None:
                self._where[block.freed_as], self._got[block.freed_as] = address, size
                self._home[block.freed_as] = self._lists[index]
            address += size

    def _base(self, index: int) -> int:
        """Return the first page of a pool's segment, larger than any device."""
        base = (index + 1) * 2 * _SPAN
        if base not in self._segments:
            self._segments[base] = self._gaps[base] = _SPAN
        return base

    def _granule(self, index: int) -> int:
        """Return in how many pages at once a pool's segment is mapped."""
        return _SMALL_SEGMENT if index % 2 == 0 else self._allocator.large_segment_bytes // _PAGE

    def _map(self, index: int, first: int, pages: int) -> None:
        """Map pages in the gap where they lie."""
        gap = max(start for start in self._gaps if start <= first and start >= self._base(index))
        size = self._gaps.pop(gap)
        if first > gap:
            self._gaps[gap] = first - gap
        if gap + size > first + pages:
            self._gaps[first + pages] = gap + size - first - pages
        self._reserved += pages
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    def _new(self, size: int, free: list[int], now: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        """Map pages for a request, behind a free block where one ends at the gap."""
        index = next(i for i, each in enumerate(self._lists) if each is free)
        if not self._grow(index, size):
            self._release()
            if not self._grow(index, size):
                raise _OutOfMemory
        address = self._grown
        pages = self._starts.pop(address)
        del self._ends[address + pages]
        free.remove(pages << _SHIFT | address)
        return address, pages

    def _grow(self, index: int, size: int) -> bool:
        base, free = self._base(index), self._lists[index]
        start = next(
            start
            for gap in sorted(gap for gap in self._gaps if base <= gap < base + _SPAN)
            if self._room(start := self._ends.get(gap, gap), size)
        )
        granule = self._granule(index)
        while self._starts.get(start, 0) < size:
            have = self._starts.get(start, 0)
            gap = start + have
            pages = -(-min(size - have, self._gaps[gap]) // granule) * granule
            if self._reserved + pages > min(self._limit, self._allowed):
                return False
            self._map(index, gap, pages)
            self._put_beside(free, gap, pages)
        self._grown = start
        return True

    def _room(self, start: int, size: int) -> bool:
        """Tell whether free blocks and gaps from *start* on are large enough together."""
        room = 0
        while room < size:
            pages = self._starts.get(start + room) or self._gaps.get(start + room)
            if not pages:
                return False
            room += pages
        return True

    def _put_beside(self, free: list[int], address: int, pages: int) -> None:
        """Put a free block, joined with its free neighbours."""
        end = address + pages
        if end in self._starts:
            after = self._starts.pop(end)
            free.remove(after << _SHIFT | end)
            end += after
        if address in self._ends:
            before = self._ends.pop(address)
            free.remove((address - before) << _SHIFT | before)
            address = before
        self._put(free, address, end - address)

    def _release(self) -> None:
        """Unmap every page that is wholly free."""
        for index, each in enumerate(self._lists):
            base, granule = self._base(index), self._granule(index)
            for block in list(each):
                address, end = block & _ADDRESS, (block & _ADDRESS) + (block >> _SHIFT)
                first = base - (base - address) // granule * granule
                last = base + (end - base) // granule * granule
                if last <= first:
                    continue
                each.remove(block)
                del self._starts[address], self._ends[end]
                if first > address:
                    self._put(each, address, first - address)
                if end > last:
                    self._put(each, last, end - last)
                self._unmap(first, last)

    def _unmap(self, first: int, last: int) -> None:
        self._reserved -= last - first
        before = next((gap for gap, pages in self._gaps.items() if gap + pages == first), first)
        self._gaps[before] = last - before + self._gaps.pop(last, 0)
