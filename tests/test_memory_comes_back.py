"""After out-of-memory errors on PyTorch's real CUDA allocator, the device holds what it held before."""

import pytest
from fakes import needs_fake_gpu, run_on_fake_gpu

TRAINING = """
import gc, logging, random, torch, warnings
from torch import nn
from oomguard import oom_guard

logging.getLogger("oomguard").setLevel(logging.ERROR)
model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(57600, 10)).cuda()
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
warnings.simplefilter("ignore")

def step(x, ids):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long, device="cuda"))
    loss.backward()
    optimizer.step()
    return loss.detach(), ids

def call(guard, first, size):
    ids = torch.arange(first, first + size)
    return guard.run(step, torch.empty(size, 3, 32, 32, device="cuda"), ids)[1]

with oom_guard() as guard:
    call(guard, 0, 8)
    call(guard, 0, 1600)  # cut once, so that all that a guard keeps is there
gc.collect()
gc.freeze()  # every recovery collects, and need not look at what was imported
"""


@needs_fake_gpu
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_two_hundred_errors_in_a_row_hold_nothing(optimizer):
    printed = run_on_fake_gpu(
        TRAINING.format(optimizer=optimizer)
        + """
held, ooms = [], 0
for _ in range(200):
    with oom_guard() as guard:  # a new one, which has learnt nothing
        call(guard, 0, 1600)
    ooms += guard.report.ooms
    held.append(torch.cuda.memory_allocated())
# cuBLAS takes its workspaces now and then, and gives them back; nothing else comes or stays.
assert set(held[100:]) <= set(held[:100]), sorted(set(held))
print(ooms >= 200)
""",
        "1GiB",
    )

    assert printed == "True\n"


@needs_fake_gpu
def test_two_thousand_steps_of_which_a_third_run_out_use_every_sample_once():
    printed = run_on_fake_gpu(
        TRAINING.format(optimizer="Adam")
        + """
rng, first, used, before = random.Random(0), 0, [], torch.cuda.memory_allocated()
with oom_guard(grow_after=1) as guard:  # forgets at once, so that it goes on running out
    for _ in range(2000):
        size = rng.randint(1, 1600)
        used.append(call(guard, first, size))
        first += size
assert torch.equal(torch.cat(used), torch.arange(first))
report, growth = guard.report, torch.cuda.memory_allocated() - before
print(report.calls, 600 < report.split_calls, 600 < report.ooms, growth <= 0)
""",
        "1GiB",
        timeout=400,
    )

    assert printed == "2000 True True True\n"
