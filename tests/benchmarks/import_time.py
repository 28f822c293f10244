"""
What `import oomguard` adds to `import torch`: `python tests/benchmarks/import_time.py`.

Each sample is a new interpreter; the medians of both imports are of the same run.
Byte code is kept, as it is after an installation.
"""

import os
import statistics
import subprocess
import sys
import tempfile

CODE = """
import time
started = time.perf_counter()
import torch
middle = time.perf_counter()
import oomguard
print(middle - started, time.perf_counter() - middle)
"""


def main() -> None:
    """Print one line."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        samples = []
        for _ in range(12):
            done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, check=True, env=environment)
            samples.append(tuple(map(float, done.stdout.split())))
    torch_ms, oomguard_ms = (
        1000 * statistics.median(column) for column in zip(*samples[1:], strict=True)
    )  # 1: compiles
    print(f"import torch {torch_ms:.0f} ms, import oomguard after it {oomguard_ms:.1f} ms (allowed: 30)")


if __name__ == "__main__":
    main()
