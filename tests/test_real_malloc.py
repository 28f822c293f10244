"""The operating system refuses memory for real: a child whose address space is limited trains to the same numbers."""

import subprocess
import sys

import pytest

CHILD = """
import resource, sys
import torch
from torch import nn
from oomguard import Input, fit_batch, oom_guard

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 8)).double()
optimizer = torch.optim.Adam(model.parameters())

@fit_batch(inputs={"x": Input(64, dtype=torch.float64)}, max_batch_size=64)
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

batches = [torch.randn(6000, 64, dtype=torch.float64) for _ in range(4)]
step(batches[0][:64])  # lazy set-up, before the limit
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
if sys.argv[2] == "probe":
    report = step.probe(max_batch_size=None, steps_per_trial=1)
    print(report.batch_size, report.capacity_bytes <= 301 * 2**20 + sum(p.nbytes for p in model.parameters()) * 4)
    sys.exit()
with oom_guard() as guard:
    losses = [step(x).item() for x in batches]
print(guard.report.ooms, file=sys.stderr)
print(guard.report.events[0].reason[:200] if guard.report.events else "", file=sys.stderr)
print(repr(losses), [repr(p.double().sum().item())[:12] for p in model.parameters()])
"""


def run(limit, what="train"):
    return subprocess.run(
        [sys.executable, "-c", CHILD, limit, what], capture_output=True, text=True, check=True, timeout=300
    )


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not enforced elsewhere")
def test_a_refused_malloc_is_survived_with_the_same_numbers():
    free, limited = run("free"), run("limited")

    ooms, reason, *_ = limited.stderr.strip().splitlines()[-2:]
    assert int(ooms) > 0
    assert "DefaultCPUAllocator" in reason
    losses, _, sums = limited.stdout.partition("] ")
    expected, _, expected_sums = free.stdout.partition("] ")
    assert eval(losses + "]") == pytest.approx(eval(expected + "]"), rel=1e-9)
    assert sums == expected_sums
    assert free.stderr.split()[0] == "0"


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not enforced elsewhere")
def test_a_probe_under_a_limit_meets_no_refused_malloc():
    size, within = run("limited", "probe").stdout.split()

    assert within == "True"
    assert 100 < int(size) < 6000
