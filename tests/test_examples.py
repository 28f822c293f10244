"""The examples run on a machine without a GPU."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_reaches_97_percent_in_pieces():
    pytest.importorskip("sklearn", reason="digits.py needs scikit-learn's images")

    printed = run(EXAMPLES / "digits.py", "--capacity", "64MiB")

    accuracy = float(re.search(r"test accuracy ([\d.]+)", printed)[1])
    assert accuracy >= 0.97
    assert re.search(r"train_step on cpu: batch size \d+ \(search: replay", printed)
    assert re.search(r"81 guarded calls: 1 out-of-memory error met, 41 run in pieces", printed)


def test_resnet50_finds_its_size_and_trains():
    pytest.importorskip("torchvision", reason="resnet50_fakedata.py needs torchvision")

    printed = run(EXAMPLES / "resnet50_fakedata.py", "--capacity", "700MiB", "--steps", "1")

    assert re.search(r"find_batch_size \(doubling\): (\d+)", printed)[1] == "4"
    assert re.search(r"fit_batch: (\d+)", printed)[1] == "5"
    assert "1 guarded call: 0 out-of-memory errors met" in printed


def test_the_users_unit_tests_pass():
    printed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin(), EXAMPLES / "test_my_training.py")

    assert "5 passed" in printed


def plugin():
    installed = any(entry.name == "oomguard" for entry in importlib.metadata.entry_points(group="pytest11"))
    return [] if installed else ["-p", "oomguard.testing.plugin"]
