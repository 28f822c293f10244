"""
Random programs on the real CUDA allocator, each beside its replay; run on the fake GPU by test_replay.

Arguments: the seed, how many programs, and the fraction of the device that the process may take.
"""

import dataclasses
import os
import random
import sys

import torch

from oomguard.memory.replay import Outcome, Polynomial, Replay
from oomguard.memory.trace import AllocatorHistory

DEVICE = torch.device("cuda", 0)
HELD = [100, 3000, 700_000, 2_000_000, 30_000_000]
RANGES = [(1, 2000), (2000, 1_500_000), (1_000_000, 12_000_000), (10_000_000, 90_000_000)]


def empty(size):
    return torch.empty(size, dtype=torch.uint8, device=DEVICE)


def run(rng):
    """Run one program; return what the allocator says of it, and what the replay does."""
    held = [empty(rng.choice(HELD)) for _ in range(rng.randint(0, 6))]
    held = [None if rng.random() < 0.4 else each for each in held]  # leaves holes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    history = AllocatorHistory(DEVICE)
    live, used, fits = [], [], True
    try:
        for _ in range(400):
            if rng.random() < 0.55 or not live:
                size, stream = rng.randint(*rng.choice(RANGES)), rng.random() < 0.1
                with torch.cuda.stream(streams[stream]):
                    live.append(empty(size))
                used.append(stream)
            else:
                live.pop(rng.randrange(len(live)))
            if held and rng.random() < 0.02:
                held.pop()
    except torch.OutOfMemoryError:
        fits = False
    history.step_ended()
    trace = history.close(1)
    real = Outcome(fits, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    if not fits:  # the request that failed is no event: it is added by hand
        pool = trace.pools[used.index(stream)] if stream in used else 1 + max(trace.pools)
        count = len(trace.sizes)
        order = tuple(~(~n + 1) if ~n >= count else n for n in trace.order)  # what was held is numbered after it
        segments = tuple(
            dataclasses.replace(
                segment,
                blocks=tuple(
                    block if block.freed_as is None else dataclasses.replace(block, freed_as=block.freed_as + 1)
                    for block in segment.blocks
                ),
            )
            for segment in trace.segments
        )
        trace = dataclasses.replace(
            trace,
            order=(*order, count),
            sizes=(*trace.sizes, size),
            pools=(*trace.pools, pool),
            segments=segments,
        )
    replayed = Replay(trace, [Polynomial(0, 0, size, 1) for size in trace.sizes]).run(1, limit)
    return real, replayed


def main(seed, count, fraction):
    torch.cuda.init()
    if fraction < 1:
        torch.cuda.set_per_process_memory_fraction(fraction)
    ran_out = 0
    for number in range(seed, seed + count):
        real, replayed = run(random.Random(number))
        ran_out += not real.fits
        if real != replayed:
            print("program", number, "real", real, "replayed", replayed)
    print(f"{count} programs, {ran_out} ran out")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
