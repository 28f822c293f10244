"""
Run a script on the fake GPU, and say whether its memory would do and what fills it.

`python -m oomguard dry-run --capacity 24GiB -- train.py ARGS` on a shell. The script is run
unmodified, in a process of its own, and takes milliseconds a step at any batch size.
"""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard.memory.units import parse_bytes
from oomguard.testing import fake_gpu, recorder

_MOST_ROWS = 10
_WIDEST = 40  # characters of a path
_VISIBLE = 2**30 // 200  # what is less shows as 0.00 GiB
_NOTE = (
    "Kernels were not run and values are zeros: losses and metrics above mean nothing. A real card needs some\n"
    "more than this: workspaces that cuDNN and cuBLAS choose there, and whatever else runs on it."
)


@dataclass(frozen=True)
class Row:
    """
    The blocks that one line of the script had asked for.

    Attributes:
        where: The line, as file:line, or what else it was.
        text: The line itself, as written.
        size_bytes: Of all blocks together.
        count: How many blocks.
    """

    where: str
    text: str
    size_bytes: int
    count: int


@dataclass(frozen=True)
class DeviceRecord:
    """
    What a script did with the memory of one device.

    Attributes:
        device: Its number.
        capacity_bytes: What it has.
        peak_allocated_bytes: The most that tensors took at once.
        peak_reserved_bytes: The most that the allocator held at once.
        at_oom: The rows tell of the moment when memory ran out, not of the peak.
        overflowed: There were more events than are kept, so that the rows tell of the latest ones' peak.
        rows: What was alive then, the largest first.
    """

    device: int
    capacity_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    at_oom: bool
    overflowed: bool
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class DryRun:
    """
    How a script fared on the fake GPU; `str()` is the report.

    Attributes:
        script: The script and its arguments.
        outcome: "ran", "ran out", "failed" (another error), "exited" (with a status of its own) or
            "vanished" (the process ended without giving its record).
        status: The exit status of the script.
        place: The user's own innermost line when it failed, as file:line.
        function: The function that this line is in.
        error: The first line of the error that ended it.
        oom_count: The requests that were refused, handled by the script or not.
        devices: The devices that it used.
    """

    script: tuple[str, ...]
    outcome: str
    status: int
    place: str | None
    function: str | None
    error: str | None
    oom_count: int
    devices: tuple[DeviceRecord, ...]

    def __str__(self) -> str:
        if not self.devices and self.outcome != "vanished":
            return f"{self._verdict()}\nIt used no GPU in its own process; processes that it starts are not recorded."
        return "\n\n".join([self._verdict(), *(_device_text(record) for record in self.devices), _NOTE])

    def _verdict(self) -> str:
        name = " ".join(self.script)
        handled = self.oom_count - (self.outcome == "ran out")
        also = f" It handled {_counted(handled, 'out-of-memory error')} itself." if handled > 0 else ""
        if self.outcome == "ran":
            return f"oomguard dry run: {name} {'fits' if self.devices else 'runs'}.{also}"
        if self.outcome == "exited":
            return f"oomguard dry run: {name} ended with status {self.status} of its own.{also}"
        if self.outcome == "vanished":
            return (
                f"oomguard dry run: {name} ended with status {self.status} and left no record: "
                "it was killed, or left by os._exit."
            )
        what = "runs out of memory" if self.outcome == "ran out" else "fails, but not for want of memory"
        lines = [f"oomguard dry run: {name} {what}.{also}", ""]
        if self.place is not None:
            lines += [f"  {_shown(self.place)} in {self.function}", f"      {_source(self.place)}"]
        request = (self.error or "").partition(" GPU ")[0]  # what follows are the numbers that stand below
        return "\n".join([*lines, f"  {request if self.outcome == 'ran out' else self.error}"])


def dry_run(arguments: Sequence[str], capacity: int | str | Sequence[int | str] = "16GiB") -> DryRun:
    """
    Run a script on fake GPUs and return how it fared.

    The script runs in a child process that has this one's input and output. What it asks of the
    device is recorded by PyTorch's own allocator, with the Python line that asked.

    Args:
        arguments: The script and its arguments, or "-m", a module and its arguments.
        capacity: Bytes of the device, as an int or a text like "24GiB"; several for several devices.

    Returns:
        How it ended, the peaks, and what was alive at the peak or where memory ran out.

    Raises:
        OOMGuardError: The fake GPU can't work here; says why.
        ValueError: There is no script, or a capacity is none.

    Example:
        >>> if fake_gpu.why_not() is None:
        ...     with tempfile.TemporaryDirectory() as directory:
        ...         script = Path(directory, "train.py")
        ...         _ = script.write_text("import torch; torch.empty(2**30, device='cuda')")
        ...         assert dry_run([str(script)], "2GiB").outcome == "ran out"

    Note:
        Processes that the script starts see the devices too, but are not recorded.
    """
    if list(arguments) in ([], ["-m"]):
        raise ValueError("oomguard: dry-run needs a script: python -m oomguard dry-run --capacity 24GiB -- train.py")
    if arguments[0] != "-m" and not Path(arguments[0]).is_file():
        raise ValueError(f"oomguard: there is no script {arguments[0]!r}")
    environment = fake_gpu.environment(capacity)
    with tempfile.TemporaryDirectory(prefix="oomguard-") as directory:
        report = Path(directory, "report.json")
        command = [sys.executable, recorder.__file__, str(report), *arguments]
        status = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 - what the user asked for
        ended: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {"outcome": "vanished"}
    place, function = ended.get("place") or [None, None]
    return DryRun(
        script=tuple(arguments),
        outcome=ended["outcome"],
        status=status if status >= 0 else 128 - status,  # killed by a signal: as a shell says it
        place=place,
        function=function,
        error=ended.get("error"),
        oom_count=ended.get("oom_count", 0),
        devices=tuple(_device_record(record) for record in ended.get("devices", ())),
    )


def _device_record(record: dict[str, Any]) -> DeviceRecord:
    """Read one device's record, with the blocks added up by line."""
    sizes: dict[str, int] = defaultdict(int)
    counts: dict[str, int] = defaultdict(int)
    for where, size, count in record.pop("lines"):
        sizes[where] += size * count
        counts[where] += count
    rows = [Row(where, _source(where), size, counts[where]) for where, size in sizes.items()]
    return DeviceRecord(**record, rows=tuple(sorted(rows, key=lambda row: -row.size_bytes)))


def _device_text(record: DeviceRecord) -> str:
    """Lay out one device's peaks and what was alive."""
    total = sum(row.size_bytes for row in record.rows)
    shown = [row for row in record.rows[:_MOST_ROWS] if row.size_bytes >= total / 200]
    cells = [(row.size_bytes, row.count, _shown(row.where), row.text) for row in shown]
    rest = record.rows[len(shown) :]
    rest_bytes, rest_count = sum(row.size_bytes for row in rest), sum(row.count for row in rest)
    if rest_bytes >= _VISIBLE:
        cells.append((rest_bytes, rest_count, _counted(len(rest), "smaller line"), ""))
    width = max([len(where) for *_, where, _ in cells], default=0)
    count_width = max([len(f"{count}") for _, count, *_ in cells], default=0)
    lines = [
        f"GPU {record.device}",
        f"  capacity        {_gib(record.capacity_bytes)}",
        f"  CUDA context    {_gib(parse_bytes(fake_gpu.DEFAULT_CONTEXT))}  (assumed)",
        *(
            f"  {name:<16}{_gib(size)}  {_share(size, record.capacity_bytes)}"
            for name, size in (
                ("peak reserved", record.peak_reserved_bytes),
                ("peak allocated", record.peak_allocated_bytes),
            )
        ),
        "",
        "  alive when memory ran out" if record.at_oom else "  alive at the peak",
    ]
    for size, count, where, text in cells:
        blocks = f"{count:>{count_width}} {'block ' if count == 1 else 'blocks'}"
        lines.append(f"{_gib(size)}  {_share(size, total)}  {blocks}  {where:<{width}}  {text}".rstrip())
    if record.overflowed:
        lines.append(f"  (of the last {recorder.MOST_EVENTS:,} events; the first are no longer known)")
    return "\n".join(lines)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:>8.2f} GiB"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:>3.0f} %" if whole else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _shown(where: str) -> str:
    """Return file:line as seen from here."""
    path = where.removeprefix(str(Path.cwd()) + os.sep)
    return path if len(path) <= _WIDEST else "..." + path[3 - _WIDEST :]


def _source(where: str) -> str:
    """Return the text of file:line, or nothing where it is none."""
    file, _, line = where.rpartition(":")
    return linecache.getline(file, int(line)).strip() if file and line.isdigit() else ""
