"""
A GPU with memory but no arithmetic, for any Linux machine that has PyTorch's CUDA build and a C compiler.

A small CUDA runtime is loaded before PyTorch's own libraries, and PyTorch then believes
in devices of the sizes given. Its caching allocator, memory history, statistics and
`torch.OutOfMemoryError` are the real ones, and so are the paths through cuDNN, cuBLAS and
Triton; kernels are not run, so a training step takes milliseconds at any batch size and
all values are zeros, or what a copy from the host left behind.

```python
subprocess.run([sys.executable, "train.py"], env=environment("16GiB"), check=True)
```

`pytest --fake-gpu=16GiB` runs tests on it, `python -m oomguard dry-run` a script.

Two kindred public projects exist: FakeGPU, which is not on PyPI, and cuda-mock, whose last
release is of 2024. Neither serves current PyTorch.

Note:
    What only a real card knows is missing: the workspaces that cuDNN and cuBLASLt choose
    (0 bytes here), the true size of the context, and other processes. Code that decides by
    values decides by zeros: losses mean nothing, `nonzero` finds nothing. CUDA graphs
    and most sparse matrices are refused, and NCCL was not tried.
    Seen to work with torch 2.14 for CUDA 13.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from oomguard.errors import OOMGuardError
from oomguard.memory.units import parse_bytes

__all__ = ["DEFAULT_CONTEXT", "environment", "is_active", "library", "why_not"]

_HERE = Path(__file__).parent
_SOURCES = ("memory.c", "runtime.c", "driver.c", "libraries.c", "threads.c")
_LIBRARY = "libcuda.so.1"  # the driver's name, so that whoever opens the driver finds what is loaded already
_MOST_DEVICES = 16  # as in memory.h
_CAPACITY = "OOMGUARD_FAKE_GPU_CAPACITY"
_CONTEXT = "OOMGUARD_FAKE_GPU_CONTEXT"
DEFAULT_CONTEXT = "300MiB"  # of the order of a data-centre card's; the true size varies with the card and the driver

# What torch's libraries import from CUDA's, and what stands for it where no source here defines it.
_IMPORTERS = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg")
_IMPORTED = re.compile(r"_*cu(da|dnn|blas|sparse|solver|fft|rand)[A-Z_]\w*")
_SIZES = {"lwork", "workspaceinbytesondevice", "workspaceinbytesonhost"}  # what cuSOLVER's header calls them
_REFUSED = {  # these give back handles and sizes, so "success" from a function that does nothing would be a lie
    re.compile(r"cusolver\w+(Create\w*|_bufferSize)"): 1,  # CUSOLVER_STATUS_NOT_INITIALIZED
    re.compile(r"cusparse\w+"): 10,  # CUSPARSE_STATUS_NOT_SUPPORTED
    re.compile(r"cudnn(Get|Find)\w*(Algorithm|Workspace)\w*"): 3000,  # CUDNN_STATUS_NOT_SUPPORTED
    re.compile(r"cudaStreamBeginCapture\w*"): 801,  # cudaErrorNotSupported
}


def environment(
    capacity: int | str | Sequence[int | str] = "16GiB",
    *,
    context: int | str | Sequence[int | str] = DEFAULT_CONTEXT,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """
    Return the environment in which a child process sees fake GPUs.

    The first call for a version of PyTorch builds the library in the user's cache directory,
    which takes a second; it has to be in place before a process starts, so this one can't
    get the devices itself.

    Args:
        capacity: Bytes of the device, as an int or a text like "16GiB"; several for several devices.
        context: Bytes that a process's CUDA context takes from a device, for all devices or one for each.
        base: The environment to start from; by default this process's own.

    Returns:
        The whole environment, to be given to `subprocess.run(..., env=...)`.

    Raises:
        OOMGuardError: The fake GPU can't work here; says why.
        ValueError: A size is none, there is no device or more than 16, or capacities and contexts don't pair up.

    Example:
        >>> if why_not() is None:
        ...     env = environment(["16GiB", "8GiB"])
        ...     code = "import torch; assert torch.cuda.device_count() == 2"
        ...     _ = subprocess.run([sys.executable, "-c", code], env=env, check=True)

    Note:
        The devices are the child's alone: another process that gets the same environment has its own.
    """
    capacities, contexts = _devices(capacity, context)
    directory = library().parent
    variables = dict(os.environ if base is None else base)
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # it speaks of this machine's devices
    variables[_CAPACITY] = ",".join(map(str, capacities))
    variables[_CONTEXT] = ",".join(map(str, contexts))
    # PyTorch waits 10 seconds at exit for an autograd thread that the interpreter has put to sleep (see threads.c).
    variables.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "1")
    variables["LD_LIBRARY_PATH"] = _put_first(str(directory), variables.get("LD_LIBRARY_PATH", ""))
    variables["LD_PRELOAD"] = _put_first(_LIBRARY, variables.get("LD_PRELOAD", ""))
    return variables


def is_active() -> bool:
    """
    Return whether this process runs on the fake GPU.

    Example:
        >>> isinstance(is_active(), bool)
        True
    """
    return _CAPACITY in os.environ and _LIBRARY in re.split("[ :]", os.environ.get("LD_PRELOAD", ""))


def why_not() -> str | None:
    """
    Return the sentence that says why the fake GPU can't work here, or None where it can.

    Example:
        >>> reason = why_not()
        >>> reason is None or reason.startswith("the fake GPU needs ")
        True
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the fake GPU needs Linux on x86-64; this is {sys.platform} on {platform.machine()}"
    if torch.version.cuda is None or not (_torch_libraries() / "libtorch_cuda.so").exists():
        return f"the fake GPU needs a CUDA build of PyTorch; this is torch {torch.__version__}"
    if _built().exists():
        return None
    if shutil.which("cc") is None or shutil.which("nm") is None:
        return "the fake GPU needs a C compiler, cc, and nm on the PATH (on Debian and Ubuntu: apt install gcc)"
    missing = [name for name in ("cuda.h", "cudnn.h", "crt/host_defines.h") if not _directories_with(name)]
    if missing:
        return (
            f"the fake GPU needs CUDA's header {missing[0]}, and no package beside PyTorch brings it "
            "(looked in nvidia/*/include and triton/backends/nvidia/include)"
        )
    return None


def library() -> Path:
    """
    Return the built library, and build it first where this version of PyTorch has none yet.

    Raises:
        OOMGuardError: The fake GPU can't work here, or the compiler failed; says why.

    Example:
        >>> why_not() is not None or library().name == "libcuda.so.1"
        True
    """
    reason = why_not()
    if reason is not None:
        raise OOMGuardError(f"oomguard: {reason}")
    built = _built()
    if not built.exists():
        built.parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent.parent, prefix="building-") as scratch:
            _build(Path(scratch))
            try:  # renamed whole: another process that builds at the same time sees all of it or nothing
                Path(scratch, "done").rename(built.parent)
            except OSError:
                if not built.exists():  # and if the other was first, its library is as good
                    raise
    return built


def _devices(
    capacity: int | str | Sequence[int | str], context: int | str | Sequence[int | str]
) -> tuple[list[int], list[int]]:
    """Return the bytes of each device and those of its context."""
    capacities = [parse_bytes(size) for size in ([capacity] if isinstance(capacity, int | str) else capacity)]
    if not 1 <= len(capacities) <= _MOST_DEVICES:
        raise ValueError(f"oomguard: there can be 1 to {_MOST_DEVICES} fake GPUs, got {len(capacities)} capacities")
    sizes = [context] * len(capacities) if isinstance(context, int | str) else list(context)
    contexts = [0 if size == 0 else parse_bytes(size, name="context") for size in sizes]
    if len(contexts) != len(capacities):
        raise ValueError(
            f"oomguard: {len(contexts)} contexts for {len(capacities)} fake GPUs; give one for all or one for each"
        )
    return capacities, contexts


def _put_first(entry: str, entries: str) -> str:
    """Return the colon-separated *entries* with *entry* first, and only there."""
    return ":".join([entry, *(other for other in entries.split(":") if other not in {"", entry})])


def _torch_libraries() -> Path:
    return Path(torch.__file__).parent / "lib"


def _built() -> Path:
    """Return where the library for this PyTorch and these sources is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256()
    for path in (*(_HERE / name for name in ("memory.h", *_SOURCES)), Path(__file__)):
        key.update(path.read_bytes())
    key.update(f"{torch.version.git_version} {torch.backends.cudnn.version()}".encode())
    return cache / "oomguard" / f"fake-gpu-torch-{torch.__version__}-{key.hexdigest()[:16]}" / _LIBRARY


def _directories_with(header: str) -> list[Path]:
    """Return the packages' include directories that have *header*; CUDA's own packages before Triton's copy."""
    site = Path(torch.__file__).parent.parent
    directories = [*sorted(site.glob("nvidia/*/include")), site / "triton/backends/nvidia/include"]
    return [directory for directory in directories if (directory / header).exists()]


def _build(scratch: Path) -> None:
    """Compile the library into *scratch*/done."""
    done = scratch / "done"
    done.mkdir()
    names = {name for names in map(_imports, _IMPORTERS) for name in names if _IMPORTED.fullmatch(name)}
    solver = _solver(names)
    rest = _rest((names | _driver_names()) - solver.keys())
    (scratch / "rest.c").write_text("".join(["#include <stdlib.h>\n", *solver.values(), *rest]))
    includes = dict.fromkeys(
        directory for name in ("cuda.h", "cudnn.h", "crt/host_defines.h") for directory in _directories_with(name)
    )
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{_LIBRARY}", "-o", str(done / _LIBRARY)]
    command += [f"-I{directory}" for directory in includes]
    command += [*(str(_HERE / name) for name in _SOURCES), str(scratch / "rest.c"), "-lpthread", "-ldl"]
    _output(command)
    # The management library is the same file under its own name; PyTorch counts devices with it.
    (done / "libnvidia-ml.so.1").symlink_to(_LIBRARY)


def _imports(importer: str) -> list[str]:
    """Return the names that one of torch's libraries wants from others."""
    path = _torch_libraries() / f"lib{importer}.so"
    if not path.exists():
        return []
    listing = _output(["nm", "-D", "--undefined-only", str(path)])
    return [line.split()[-1].split("@")[0] for line in listing.splitlines()]


def _driver_names() -> set[str]:
    """Return the driver's functions, each under every name that it has had."""
    header = (_directories_with("cuda.h")[0] / "cuda.h").read_text()
    renamed = re.findall(r"#\s*define\s+(cu[A-Z]\w+)\s+(?:__CUDA_API_\w+\()?(cu[A-Z]\w+)", header)
    return {*re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", header), *(name for pair in renamed for name in pair)}


def _solver(names: set[str]) -> dict[str, str]:
    """
    Return, by name, C functions for cuSOLVER's descriptors, and for its sizes of workspaces: 0 bytes.

    They are written from its header, which names the places to fill in; without it cuSOLVER is refused.
    """
    functions = {}
    for directory in _directories_with("cusolverDn.h")[:1]:
        header = (directory / "cusolverDn.h").read_text()
        for name, parameters in re.findall(r"\b(cusolverDn\w+)\(([^)]*)\)\s*;", header):
            written = [parameter.split() for parameter in parameters.replace("*", " * ").split(",")]
            body = "".join(
                f"*({words[0]} *)p{i} = 0; "
                for i, words in enumerate(written)
                if "*" in words and words[-1].lower() in _SIZES
            )
            if "Create" in name:
                body = "*(void **)p0 = calloc(1, 256); "
            if name in names and body:
                arguments = ", ".join(f"long p{i}" for i in range(len(written)))
                functions[name] = f"long {name}({arguments}) {{ {body}return 0; }}\n"
    return functions


def _rest(names: set[str]) -> Iterator[str]:
    """Yield C functions for all *names*; weak ones, so that those which the sources define win."""
    for name in sorted(names):
        status = next((number for pattern, number in _REFUSED.items() if pattern.fullmatch(name)), 0)
        yield f"__attribute__((weak)) long {name}(void) {{ return {status}; }}\n"


def _output(command: list[str]) -> str:
    """Return what *command* prints."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own words
    except subprocess.CalledProcessError as error:
        raise OOMGuardError(
            f"oomguard: building the fake GPU failed: {' '.join(command)} said\n{error.stderr.strip()}"
        ) from None
