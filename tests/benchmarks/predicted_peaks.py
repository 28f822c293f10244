"""
Predicted peaks beside the allocator's own: `python tests/benchmarks/predicted_peaks.py`.

On the fake GPU of 80 GiB, each step is traced at a thirty-second and at a sixteenth of
the largest batch that fits; the peaks predicted for 4 and 16 times the larger one are
compared with the statistics of a run, and one replay is timed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

CAPACITY = "80GiB"


def measure(case_name: str) -> None:
    """Print a line of JSON for each size predicted."""
    import torch  # noqa: PLC0415 - only the child has a GPU
    from finders import CASES, STEPS, Counted  # noqa: PLC0415

    from oomguard.memory.replay import Replay  # noqa: PLC0415
    from oomguard.memory.trace import AllocatorHistory, Trace  # noqa: PLC0415

    def trace(case: Counted, size: int) -> Trace:
        case.reset()
        torch.cuda.reset_peak_memory_stats()
        history = AllocatorHistory(torch.device("cuda", 0))
        for _ in range(STEPS):
            case.run(size)
            history.step_ended()
        found = history.close(size)
        if found is None:
            raise SystemExit(f"no trace of {case_name} at {size}")
        return found

    case = CASES[case_name]()
    case.run(2)
    sizes = [max(1, case.true_maximum() // share // 2 * 2) for share in (32, 16)]
    trace(case, 2)  # what is made once
    small, large = (trace(case, size) for size in sizes)
    if small.order == large.order:
        replay = Replay.from_traces([small, large])
    else:  # other kernels at the larger size: how its allocations grow is known from smaller ones
        less = (trace(case, sizes[0] * share // 16) for share in range(15, 7, -1))
        replay = Replay.from_traces([small, next(t for t in less if t.order == small.order)]).adopt(large)
    case.reset()
    limit = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    started = time.perf_counter()
    for _ in range(5):
        replay.run(sizes[1])
    milliseconds = (time.perf_counter() - started) * 1000 / 5
    for times in (4, 16):
        size = times * sizes[1]
        predicted = replay.run(size, limit)
        trace(case, size)
        real = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        row = {
            "case": case_name,
            "traced": sizes,
            "size": size,
            "allocated": predicted.allocated_bytes / real[0] - 1,
            "reserved": predicted.reserved_bytes / real[1] - 1,
            "events": len(replay.trace.order),
            "milliseconds": milliseconds,
        }
        print(json.dumps(row), flush=True)
    os._exit(0)


def main() -> None:
    """Measure each step in a process of its own, and print the table."""
    if sys.argv[1:2] == ["--child"]:
        measure(sys.argv[2])
    from finders import CASES  # noqa: PLC0415

    from oomguard.testing import fake_gpu  # noqa: PLC0415

    rows = []
    print(f"{'step':24}{'traced':>14}{'size':>8}{'allocated':>11}{'reserved':>10}{'events':>8}{'ms a replay':>13}")
    for name in CASES:
        command = [sys.executable, __file__, "--child", name]
        done = subprocess.run(command, env=fake_gpu.environment(CAPACITY), capture_output=True, text=True, check=False)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not found:
            print(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
        for row in found:
            rows.append(row)
            traced = " and ".join(map(str, row["traced"]))
            errors = f"{row['allocated']:+11.2%}{row['reserved']:+10.2%}"
            print(
                f"{name:24}{traced:>14}{row['size']:8}{errors}{row['events']:8}{row['milliseconds']:13.1f}", flush=True
            )
    for kind in ("allocated", "reserved"):
        errors = [abs(row[kind]) for row in rows]
        print(f"{kind}: median error {statistics.median(errors):.2%}, largest {max(errors):.2%}, of {len(errors)}")


if __name__ == "__main__":
    main()
