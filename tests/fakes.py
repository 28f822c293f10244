"""Children on the fake GPU, for the tests that need PyTorch's real CUDA allocator and no card."""

import subprocess
import sys
import textwrap

import pytest

from oomguard.testing import fake_gpu

_REASON = fake_gpu.why_not()


def needs_fake_gpu(test):
    """Mark a test that runs children on the fake GPU, and skip it where that can't work."""
    return pytest.mark.fake_gpu(pytest.mark.skipif(_REASON is not None, reason=str(_REASON))(test))


def child_on_fake_gpu(arguments, capacity="16GiB", *, timeout=240, variables=None, **options):
    """Run Python with *arguments* on the fake GPU and return the finished process."""
    environment = fake_gpu.environment(capacity, **options) | {"OMP_NUM_THREADS": "1"} | (variables or {})
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def run_on_fake_gpu(code, capacity="16GiB", **options):
    """Run *code* on the fake GPU and return what it printed; one that fails is the test's failure."""
    done = child_on_fake_gpu(["-c", textwrap.dedent(code)], capacity, **options)
    if done.returncode != 0:
        pytest.fail(f"the child on the fake GPU ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
