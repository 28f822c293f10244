"""What the README shows is what its commands print."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def without_times(printed):
    """Leave out the columns of a trial that say how fast this machine is."""
    return [re.sub(r"(\d+%).*?(<- answer)?$", r"\1 \2", line).rstrip() for line in printed.strip().splitlines()]


def test_the_first_example_is_the_file_that_runs():
    assert (ROOT / "examples" / "readme.py").read_text().partition("\n\n")[2] == blocks("python")[0]


def test_the_first_example_prints_what_stands_below_it():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "readme.py"], capture_output=True, text=True, check=True, env=environment
    )

    assert without_times(done.stdout) == without_times(blocks("text")[0])


def test_the_fresh_machine_block_is_two_commands():
    commands = README.partition("<!-- fresh machine -->")[2].partition("```sh\n")[2].partition("```")[0].splitlines()

    assert [command.partition(" && ")[0] for command in commands] == [
        "pip install '.[examples]'",
        "pip install '.[test]'",
    ]
