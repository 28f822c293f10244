"""
Run a script, and write down what it did with device memory: the child's side of a dry run.

It is started as a file and imports neither oomguard nor torch, so that the script is the
first to import torch, and what it sets before counts.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import sysconfig
import traceback
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import wrapt

MOST_EVENTS = 200_000  # some ten to a hundred steps; a training loop comes back to its peak in each
NOT_FROM_PYTHON = "backward pass"  # autograd's own threads, and whatever else no line of Python calls
BEFORE = "before the record begins"
_UNIT = 512  # the allocator rounds every request up to a multiple of it
_LIBRARIES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

Lines = Counter[tuple[str, int]]  # how many blocks there are by the line that asked for them, and their bytes


class Life(NamedTuple):
    """A block of device memory, alive from one event until another."""

    begin: int
    end: int
    size_bytes: int
    where: str


class Recorder:
    """
    What is seen of one script's device memory.

    Args:
        own_directory: Where the script is.
    """

    def __init__(self, own_directory: str) -> None:
        # A script of a library's own (python -m package.train) is the user's too, the libraries beside it are not.
        self._foreign = tuple(path for path in _LIBRARIES if not (own_directory + os.sep).startswith(path))
        self._at_oom: dict[int, Lines] = {}
        self.oom_count = 0

    def watch(self, torch: Any) -> None:
        """Have the allocator keep its history from the script's first use of a device on."""
        torch.cuda._lazy_call(self._begin)

    def _begin(self) -> None:
        torch = sys.modules["torch"]
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MOST_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(self._see_oom)

    def _see_oom(self, device: int, *_: int) -> None:
        """Note what lives where a request is refused: when the error arrives, much of it is gone."""
        self.oom_count += 1
        self._at_oom[device] = Counter((life.where, life.size_bytes) for life in self._alive_now(device).values())

    def devices(self, *, ran_out: bool) -> list[dict[str, Any]]:
        """Return the record of each device that was used; where the script ran out, of that moment."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return []
        traces = torch.cuda.memory._snapshot()["device_traces"]
        records = []
        for device, events in enumerate(traces):
            statistics = torch.cuda.memory_stats(device)
            if not statistics.get("allocation.all.allocated"):
                continue
            is_at_oom = ran_out and device in self._at_oom
            lines = self._at_oom[device] if is_at_oom else self._at_peak(device, events)
            records.append(
                {
                    "device": device,
                    "capacity_bytes": torch.cuda.mem_get_info(device)[1],
                    "peak_allocated_bytes": statistics["allocated_bytes.all.peak"],
                    "peak_reserved_bytes": statistics["reserved_bytes.all.peak"],
                    "at_oom": is_at_oom,
                    "overflowed": len(events) >= MOST_EVENTS and not is_at_oom,
                    "lines": [[where, size, count] for (where, size), count in lines.items()],
                }
            )
        return records

    def _alive_now(self, device: int) -> dict[int, Life]:
        """Return what lives now, by address."""
        segments = sys.modules["torch"]._C._cuda_memorySnapshot((0, 0, False))["segments"]
        return {
            block["address"]: Life(-1, sys.maxsize, block["size"], self._line_of(block))
            for segment in segments
            if segment["device"] == device
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    def _at_peak(self, device: int, events: list[dict[str, Any]]) -> Lines:
        """Return what lived when most did, as far back as the events reach."""
        lives = self._lives(device, events)
        change = [0] * (len(events) + 1)  # from one event to the next; place 0 is before the first
        for life in lives:
            change[life.begin + 1] += life.size_bytes
            if life.end < len(events):
                change[life.end + 1] -= life.size_bytes
        totals = list(accumulate(change))
        peak = totals.index(max(totals)) - 1
        return Counter((life.where, life.size_bytes) for life in lives if life.begin <= peak < life.end)

    def _lives(self, device: int, events: list[dict[str, Any]]) -> list[Life]:
        """Return every block that the events or the present tell of."""
        over: list[Life] = []
        alive: dict[int, Life] = {}
        for i, event in enumerate(events):
            size = -(-event["size"] // _UNIT) * _UNIT
            if event["action"] == "alloc":
                alive[event["addr"]] = Life(i, sys.maxsize, size, self._line_of(event))
            elif event["action"] == "free_requested":
                life = alive.pop(event["addr"], Life(-1, i, size, BEFORE))
                over.append(life._replace(end=i))
        return [*over, *(self._alive_now(device) | alive).values()]

    def _line_of(self, entry: dict[str, Any]) -> str:
        """Return the innermost line of the user's own that asked for the memory."""
        for frame in entry.get("frames", ()):
            if self.is_own(frame["filename"]):
                return f"{frame['filename']}:{frame['line']}"
        return NOT_FROM_PYTHON

    def is_own(self, file: str) -> bool:
        """Return whether *file* is the user's: no library's, and not made by a compiler."""
        if file.startswith("<") or file == __file__ or "torchinductor_" in file:
            return False
        return not file.startswith(self._foreign)


def place_of(error: BaseException, recorder: Recorder) -> tuple[str, str] | None:
    """Return the user's own innermost line in the traceback, as file:line, and its function."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if recorder.is_own(frame.filename)]
    return (f"{frames[-1].filename}:{frames[-1].lineno}", frames[-1].name) if frames else None


def run(arguments: list[str], recorder: Recorder) -> dict[str, Any]:
    """Run the script or `-m` module as Python itself would, and return how it ended."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is not None and not isinstance(exit_.code, int):
            sys.stderr.write(f"{exit_.code}\n")  # as Python does
            return {"outcome": "exited", "status": 1}
        return {"outcome": "exited" if exit_.code else "ran", "status": int(exit_.code or 0)}
    except BaseException as error:  # noqa: BLE001 - whatever ends a script is what it ended with
        torch = sys.modules.get("torch")
        ran_out = torch is not None and isinstance(error, torch.OutOfMemoryError)
        _print_traceback(error)
        return {
            "outcome": "ran out" if ran_out else "failed",
            "status": 130 if isinstance(error, KeyboardInterrupt) else 1,
            "place": place_of(error, recorder),
            "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
        }
    return {"outcome": "ran", "status": 0}


def _print_traceback(error: BaseException) -> None:
    """Print it as Python does, without the frames that started the script."""
    frame = error.__traceback__
    while frame is not None and (
        frame.tb_frame.f_code.co_filename == __file__ or frame.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        frame = frame.tb_next
    traceback.print_exception(type(error), error, frame)


def main(report: str, arguments: list[str]) -> int:
    """Run the script, write the record to *report*, and return the status to leave with."""
    is_module = arguments[0] == "-m"
    own_directory = str(Path.cwd()) if is_module else str(Path(arguments[0]).resolve().parent)
    recorder = Recorder(own_directory)
    wrapt.register_post_import_hook(recorder.watch, "torch")
    ended = run(arguments, recorder)
    ended["devices"] = recorder.devices(ran_out=ended["outcome"] == "ran out")
    ended["oom_count"] = recorder.oom_count
    Path(report).write_text(json.dumps(ended))
    return int(ended["status"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
