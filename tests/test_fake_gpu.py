"""The fake GPU: PyTorch's own CUDA allocator and libraries on a device that has memory and nothing else."""

import concurrent.futures
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import child_on_fake_gpu, needs_fake_gpu, run_on_fake_gpu

from oomguard.errors import OOMGuardError
from oomguard.testing import fake_gpu

FILL = """
import torch

def fill(device="cuda"):
    blocks = []
    try:
        while True:
            blocks.append(torch.empty(100 * 2**20, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError as error:
        return blocks, str(error)
"""


@needs_fake_gpu
@pytest.mark.parametrize(("capacity", "blocks"), [("4GiB", 37), ("80GiB", 816)])
def test_the_allocator_gets_the_capacity_and_no_more(capacity, blocks):
    printed = run_on_fake_gpu(
        FILL
        + """
import resource
blocks, error = fill()
print(len(blocks), torch.cuda.memory_reserved() >> 20, torch.cuda.mem_get_info()[0] >> 20)
print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 * 2**20)
del blocks
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
print((total - free) >> 20)
""",
        capacity,
    ).splitlines()

    size = int(capacity.removesuffix("GiB"))
    free = size * 1024 - 300 - 100 * blocks
    assert printed[0] == f"{blocks} {100 * blocks} {free}"
    assert f"GPU 0 has a total capacity of {size}.00 GiB of which {free}.00 MiB is free." in printed[1]
    assert printed[2:] == ["True", "300"]  # a host with little memory will do; the context remains


@needs_fake_gpu
def test_devices_have_their_own_size_and_context():
    printed = run_on_fake_gpu(
        FILL
        + """
from oomguard.testing import fake_gpu
print(fake_gpu.is_active(), torch.cuda.device_count())
for device in range(3):
    free, total = torch.cuda.mem_get_info(device)
    print(total >> 20, (total - free) >> 20, torch.cuda.get_device_properties(device).total_memory >> 20)
    blocks, error = fill(f"cuda:{device}")
    print(len(blocks), f"GPU {device} has a total capacity" in error)
x = torch.arange(5.0, device="cuda:2")
print(x.to("cuda:1").device, torch.tensor([1.0, 2.0]).to("cuda:1").cpu().tolist())
""",
        ["2GiB", 2**30, "1.5GiB"],
        context=["300MiB", "100MiB", 0],
    )

    assert printed.splitlines() == [
        "True 3",
        *["2048 300 2048", "17 True"],
        *["1024 100 1024", "9 True"],
        *["1536 0 1536", "15 True"],
        "cuda:1 [1.0, 2.0]",
    ]


@needs_fake_gpu
def test_expandable_segments_are_held_to_the_capacity():
    printed = run_on_fake_gpu(
        FILL
        + """
for _ in range(2):
    blocks, error = fill()
    print(len(blocks), {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
    del blocks
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    print((total - free) >> 20, torch.cuda.memory_reserved())
print(torch.tensor([1.0, 2.0]).cuda().cpu().tolist())
""",
        "4GiB",
        variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )

    assert printed.splitlines() == [*["37 {True}", "300 0"] * 2, "[1.0, 2.0]"]


@needs_fake_gpu
@pytest.mark.parametrize(("expandable", "rounds"), [(False, 18), (True, 33)])
def test_fragmentation_is_the_allocators_own(expandable, rounds):
    """Each round leaves 110 MiB in a segment of 200 MiB, unless the segment grows at its end."""
    printed = run_on_fake_gpu(
        """
import torch
def take(mebibytes):
    return torch.empty(mebibytes * 2**20, dtype=torch.uint8, device="cuda")
kept = []
try:
    while True:
        take(200)
        kept.append(take(110))
except torch.OutOfMemoryError:
    print(len(kept))
""",
        "4GiB",
        variables={"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"},
    )

    assert printed == f"{rounds}\n"


@needs_fake_gpu
def test_recurrent_layers_train_with_cudnn():
    """In PyTorch itself a wrong layout of the weights is an assertion, so that running is the test of it."""
    printed = run_on_fake_gpu(
        """
import torch
from torch import nn

layers = [
    nn.LSTM(64, 128, 2, batch_first=True),
    nn.GRU(64, 128, 2, bidirectional=True, dropout=0.1, batch_first=True),
    nn.RNN(64, 128, batch_first=True),
    nn.LSTM(64, 128, 3, bias=False, bidirectional=True, batch_first=True),
    nn.LSTM(64, 128, 2, proj_size=32, bidirectional=True, batch_first=True),
]
for layer in layers:
    layer.cuda()
    optimizer = torch.optim.Adam(layer.parameters())
    kept, outputs = [], []
    for batch_size in (64, 64, 128):  # the first step makes the optimizer's state
        x = torch.randn(batch_size, 50, 64, device="cuda")
        optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        output, _ = layer(x)
        kept.append(torch.cuda.memory_allocated() - before)
        outputs.append(output.nbytes)
        output.sum().backward()
        optimizer.step()
        del output, _, x
    with torch.autocast("cuda", torch.float16):
        layer(torch.randn(8, 50, 64, device="cuda"))[0].float().sum().backward()
    buffer = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    print(len(buffer), kept[2] - kept[1] > 2 * (outputs[2] - outputs[1]) > 0)
"""
    )

    assert printed.splitlines() == ["1 True"] * 5  # one flat buffer, and much kept for the backward of each item


@needs_fake_gpu
def test_mixed_precision_trains_from_pinned_memory():
    printed = run_on_fake_gpu(
        """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler()
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.arange(64) % 10)
for images, labels in DataLoader(data, batch_size=16, num_workers=2, pin_memory=True):
    assert images.is_pinned() and labels.is_pinned()
    images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(loss.item(), len(optimizer.state), labels.cpu().tolist()[:3])
"""
    )

    assert printed == "0.0 6 [8, 9, 0]\n"  # what came from the host is there, what a kernel would make is zero


@needs_fake_gpu
def test_compiled_models_train():
    printed = run_on_fake_gpu(
        """
import torch
from torch import nn
model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda())
model(torch.randn(8, 64, device="cuda")).sum().backward()
print(torch.cuda.max_memory_allocated() > 0)
"""
    )

    assert printed == "True\n"


@needs_fake_gpu
def test_linear_algebra_and_friends_run_and_graphs_are_refused():
    printed = run_on_fake_gpu(
        """
import torch
x = torch.randn(8, 8, device="cuda")
for run in (torch.linalg.qr, torch.linalg.cholesky, torch.linalg.eigh, torch.linalg.svd, torch.inverse, torch.fft.fft):
    run(x)
q = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.half, requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    )

    assert printed == "CUDA error: operation not supported: oomguard's fake GPU can't do this\n"


@needs_fake_gpu
def test_threads_share_one_ledger():
    printed = run_on_fake_gpu(
        """
import threading
import torch

torch.cuda.init()
def use(stream):
    with torch.cuda.stream(stream):
        for _ in range(200):
            torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()

threads = [threading.Thread(target=use, args=(torch.cuda.Stream(),)) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
free, total = torch.cuda.mem_get_info()
print((total - free) >> 20)
""",
        "1GiB",
    )

    assert printed == "300\n"


@needs_fake_gpu
def test_processes_leave_with_their_own_status():
    printed = run_on_fake_gpu(
        """
import os, sys
import torch

children = {}
for status in range(20):
    child = os.fork()
    if child == 0:
        x = torch.randn(4, 8, device="cuda", requires_grad=True)
        x.sum().backward()
        sys.exit(status)
    children[child] = status
ended = dict(os.wait() for _ in children)
print({children[child] - os.waitstatus_to_exitcode(status) for child, status in ended.items()})
"""
    )

    assert printed == "{0}\n"


@needs_fake_gpu
def test_a_thread_that_is_late_does_not_abort_the_process():
    """Autograd's thread is freeing a saved tensor and asks for the interpreter's lock when that is shutting down."""
    code = """
import os, sys, threading, types
import torch

read, write = os.pipe()
is_freeing = threading.Event()

class Held:
    def __del__(self):
        is_freeing.set()
        os.read(read, 1)

class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept = torch.ones(3)
        kept.held = Held()
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Last:
    def __del__(self, write=os.write, end=write):
        write(end, b"x")

module = sys.modules["last"] = types.ModuleType("last")  # taken apart when the interpreter shuts down
module.last = Last()
del module
x = torch.randn(4, device="cuda", requires_grad=True)
threading.Thread(target=Keep.apply(x).sum().backward, daemon=True).start()
is_freeing.wait()
print("done")
sys.exit(7)
"""

    done = child_on_fake_gpu(["-c", code])

    assert (done.returncode, done.stdout, done.stderr) == (7, "done\n", "")


# ---- where it can't work ----------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine on which everything is right, and nothing built yet."""
    site = tmp_path / "site"
    for file in ("torch/lib/libtorch_cuda.so", "nvidia/x/include/cuda.h", "nvidia/x/include/cudnn.h"):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()
    (site / "triton/backends/nvidia/include/crt").mkdir(parents=True)
    (site / "triton/backends/nvidia/include/crt/host_defines.h").touch()
    monkeypatch.setattr(torch, "__file__", str(site / "torch/__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return site


def test_nothing_is_missing(bare):
    assert fake_gpu.why_not() is None


REASONS = {
    "another system": (
        lambda patch, site: patch.setattr("sys.platform", "darwin"),
        "the fake GPU needs Linux on x86-64; this is darwin on x86_64",
    ),
    "another processor": (
        lambda patch, site: patch.setattr("platform.machine", lambda: "aarch64"),
        "the fake GPU needs Linux on x86-64; this is linux on aarch64",
    ),
    "torch for the CPU": (
        lambda patch, site: patch.setattr(torch.version, "cuda", None),
        f"the fake GPU needs a CUDA build of PyTorch; this is torch {torch.__version__}",
    ),
    "a torch without its library": (
        lambda patch, site: (site / "torch/lib/libtorch_cuda.so").unlink(),
        f"the fake GPU needs a CUDA build of PyTorch; this is torch {torch.__version__}",
    ),
    "no compiler": (
        lambda patch, site: patch.setattr("shutil.which", lambda name: None if name == "cc" else name),
        "the fake GPU needs a C compiler, cc, and nm on the PATH (on Debian and Ubuntu: apt install gcc)",
    ),
    "no CUDA headers": (
        lambda patch, site: (site / "nvidia/x/include/cuda.h").unlink(),
        (
            "the fake GPU needs CUDA's header cuda.h, and no package beside PyTorch brings it "
            "(looked in nvidia/*/include and triton/backends/nvidia/include)"
        ),
    ),
    "no cuDNN headers": (
        lambda patch, site: (site / "nvidia/x/include/cudnn.h").unlink(),
        (
            "the fake GPU needs CUDA's header cudnn.h, and no package beside PyTorch brings it "
            "(looked in nvidia/*/include and triton/backends/nvidia/include)"
        ),
    ),
}


@pytest.mark.parametrize(("spoil", "reason"), REASONS.values(), ids=REASONS)
def test_what_is_missing_is_said_in_one_sentence(bare, monkeypatch, spoil, reason):
    spoil(monkeypatch, bare)

    assert fake_gpu.why_not() == reason
    with pytest.raises(OOMGuardError) as caught:
        fake_gpu.environment("1GiB")
    assert str(caught.value) == f"oomguard: {reason}"


def test_a_library_once_built_needs_no_compiler(bare, monkeypatch):
    built = fake_gpu._built()
    built.parent.mkdir(parents=True)
    built.touch()
    monkeypatch.setattr("shutil.which", lambda name: None)

    assert fake_gpu.why_not() is None
    assert fake_gpu.library() == built


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(bare, monkeypatch, tmp_path):
    for name in ("cc", "nm"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'no room' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(OOMGuardError, match=r"^oomguard: building the fake GPU failed: nm -D [^\n]* said\nno room$"):
        fake_gpu.library()
    assert list((tmp_path / "cache/oomguard").iterdir()) == []


# ---- the environment and the build ----------------------------------------------------------


@pytest.fixture
def built(bare):
    """The bare machine with a library that is only a name."""
    path = fake_gpu._built()
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_the_environment_is_whole_and_names_each_device(built):
    base = {"HOME": "/here", "LD_LIBRARY_PATH": "/a:/b", "LD_PRELOAD": "c.so", "CUDA_VISIBLE_DEVICES": "3"}

    variables = fake_gpu.environment(["2GiB", 5], context=["1MiB", 0], base=base)

    assert variables == {
        "HOME": "/here",
        "LD_LIBRARY_PATH": f"{built.parent}:/a:/b",
        "LD_PRELOAD": "libcuda.so.1:c.so",
        "OOMGUARD_FAKE_GPU_CAPACITY": "2147483648,5",
        "OOMGUARD_FAKE_GPU_CONTEXT": "1048576,0",
        "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "1",
    }
    assert fake_gpu.environment(["2GiB", 5], context=["1MiB", 0], base=variables) == variables


ARGUMENTS = {
    "no unit": ({"capacity": "16"}, "oomguard: capacity='16' is no size; write a number and one of *"),
    "no device": ({"capacity": []}, "oomguard: there can be 1 to 16 fake GPUs, got 0 capacities"),
    "many devices": ({"capacity": [1] * 17}, "oomguard: there can be 1 to 16 fake GPUs, got 17 capacities"),
    "a bad context": ({"context": "much"}, "oomguard: context='much' is no size; write a number and one of *"),
    "contexts": ({"context": [1, 2]}, "oomguard: 2 contexts for 1 fake GPUs; give one for all or one for each"),
}


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_wrong_size_is_an_error(arguments, message):
    with pytest.raises(ValueError, match="^" + message.replace("*", ".*") + "$"):
        fake_gpu.environment(**arguments)


def test_this_process_is_on_the_fake_gpu_only_where_it_was_loaded(built, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("OOMGUARD_FAKE_GPU_CAPACITY", "5")
    assert not fake_gpu.is_active()

    monkeypatch.setenv("LD_PRELOAD", "libcuda.so.1:c.so")
    assert fake_gpu.is_active()


@needs_fake_gpu
def test_two_processes_can_build_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-c", "from oomguard.testing import fake_gpu; print(fake_gpu.library())"]

    def build():
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = (future.result() for future in [pool.submit(build), pool.submit(build)])

    assert first == second == str(fake_gpu.library())
    assert [path.name for path in (tmp_path / "oomguard").iterdir()] == [Path(first).parent.name]
    assert f"torch-{torch.__version__}-" in first
    assert run_on_fake_gpu("import torch; print(torch.cuda.is_available())") == "True\n"


@needs_fake_gpu
def test_a_child_without_the_devices_is_not_touched():
    done = child_on_fake_gpu(["-c", "import sys; print('here'); sys.exit(3)"])

    assert (done.returncode, done.stdout, done.stderr) == (3, "here\n", "")
