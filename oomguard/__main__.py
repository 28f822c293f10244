"""The same from a shell: `python -m oomguard dry-run --capacity 24GiB -- train.py ARGS`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from oomguard.errors import OOMGuardError
from oomguard.testing.dry_run import dry_run


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run the command that *arguments* name, and return the status to leave with.

    A dry run gives 0 where the script ran, 1 where memory ran out, and the script's own
    status where it failed otherwise; 2 means that the command itself was wrong.

    Args:
        arguments: The words after `python -m oomguard`; by default those of this process.

    Example:
        >>> main(["dry-run", "--capacity", "24GiB", "--", "no_such_script.py"])
        2
    """
    options = _parser().parse_args(arguments)
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    try:
        run = dry_run(script, [options.capacity] * options.device_count)
    except (OOMGuardError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"\n{run}\n")
    return 1 if run.outcome == "ran out" else run.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m oomguard", description="PyTorch on a device of a given size.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    dry = commands.add_parser(
        "dry-run",
        help="run a script on a fake GPU, and say whether its memory would do",
        description="Run a script on a fake GPU: whether it runs out of memory and where, the peak, and what fills it.",
        usage="python -m oomguard dry-run --capacity 24GiB [--device-count N] -- train.py ARGS",
    )
    dry.add_argument("--capacity", required=True, metavar="SIZE", help="memory of each device, such as 24GiB")
    dry.add_argument("--device-count", type=int, default=1, metavar="N", help="how many devices (1)")
    dry.add_argument("script", nargs=argparse.REMAINDER, help="after --: the script or -m module, and its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
