"""
What an exception means, and letting go of what a caught one holds.

"Too big" arrives in many forms: a class of its own, a plain `RuntimeError` whose
text says it, an error of a library that could not get its workspace, or any of
these inside another exception. The texts below are those that PyTorch, CUDA,
ROCm, XPU and MPS are known to raise; they are matched by kind, so that another
back end's "XYZ out of memory" is understood too.

Only a `RuntimeError` is judged by its text. A `ValueError` that speaks of memory
is somebody's message, not the device's.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import inspect
import re
import traceback
from typing import TYPE_CHECKING

import torch

from oomguard.errors import OOMGuardError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Verdict(enum.Enum):
    """What an exception says about memory, and what a caller does then."""

    OOM = "out of memory"
    """Memory of the device ran out: let go, free, and try a smaller batch."""

    CAP = "size limit"
    """An operation can't take something this large: stop growing, keep the last size, free nothing."""

    HOST = "host memory"
    """Host memory or a data loader's worker: tell the user which; a smaller batch may not help."""

    NO = "not memory"
    """Something else: raise it, never try again."""

    FATAL = "device lost"
    """The device's context, the communicator or the process is gone: raise it, and start a new process."""

    AMBIGUOUS = "perhaps memory"
    """
    Memory is one of several causes: try a smaller batch once or twice, and only where
    little is free and a smaller one has passed; then raise the original.
    """


# In a group the gravest member decides: one that can't be tried again makes the whole so.
_GRAVEST_FIRST = (
    Verdict.FATAL,
    Verdict.NO,
    Verdict.HOST,
    Verdict.CAP,
    Verdict.AMBIGUOUS,
    Verdict.OOM,
)

# `torch.AcceleratorError.error_code`: numbers of cudaError_t, which HIP shares.
_CODES = {
    2: Verdict.OOM,
    9: Verdict.CAP,  # invalid configuration: a grid larger than the device can launch
    **dict.fromkeys((214, 220), Verdict.FATAL),  # uncorrectable errors of memory and NVLink
    # illegal address, launch timeout, destroyed context, assert and others: every later call fails too
    **dict.fromkeys((700, 702, 709, 710, 714, 715, 716, 717, 718, 719), Verdict.FATAL),
    **dict.fromkeys(range(900, 908), Verdict.AMBIGUOUS),  # graph capture, which must start anew
}

# Read from the top; the first that is found decides.
_TEXTS = (
    # Sticky errors. They are asynchronous, so an innocent line may report them. "Device-side assert"
    # alone says nothing: every CUDA error ends with advice on device-side assertions.
    (Verdict.FATAL, r"illegal memory access|illegal instruction was encountered|misaligned address"),
    (Verdict.FATAL, r"device-side assert triggered|unspecified launch failure|the launch timed out"),
    (Verdict.FATAL, r"hardware stack error|invalid program counter|context is destroyed"),
    (Verdict.FATAL, r"operation not supported on global/shared address space"),
    (Verdict.FATAL, r"uncorrectable (?:ECC|NVLink) error|DEVICE_LOST"),
    (
        Verdict.FATAL,
        r"NCCL (?:error|WARN)|Failed to CUDA calloc|nccl(?:Unhandled|System|Internal|Remote)\w*Error",
    ),
    (Verdict.FATAL, r"Error out of memory at line \d+ in file"),  # bitsandbytes, which then ends the process
    # Before OOM: what is pinned or loaded is host memory, whatever the text inside says.
    (Verdict.HOST, r"[Pp]in memory thread"),
    (Verdict.HOST, r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly"),
    (Verdict.HOST, r"DataLoader worker \(pid \d+\) is killed by signal: (?:Bus error|Killed)"),
    (
        Verdict.HOST,
        r"unable to allocate shared memory|unable to mmap memory|</torch_.*No space left on device",
    ),
    (Verdict.HOST, r"OUT_OF_HOST_MEMORY|std::bad_alloc"),
    # A negative or overflowed size: rather a mistake than the batch.
    (Verdict.AMBIGUOUS, r"Tried to allocate more than 1EB"),
    (Verdict.AMBIGUOUS, r"called with negative number|[Ss]ize calculation overflowed"),
    # "CUDA out of memory", "MPS backend out of memory", "CUDA ran out of memory"; then with more before a
    # colon: "CUDA error: out of memory", "Triton Error [CUDA]: out of memory".
    (Verdict.OOM, r"\b[A-Z][A-Z0-9]+(?: backend| ran)? [Oo]ut of [Mm]emory"),
    (Verdict.OOM, r"\b(?:[A-Z]{2,}|[Cc]uda|[Hh]ip).*: [Oo]ut of memory"),
    (Verdict.OOM, r"would exceed allowed memory"),  # cudaMallocAsync
    (Verdict.OOM, r"_OUT_OF_(?:DEVICE_)?MEMORY\b"),
    (Verdict.OOM, r"_ALLOC(?:ATION)?_FAILED\b|miopenStatusAllocFailed|rocblas_status_memory_error"),
    (Verdict.OOM, r"CPUAllocator: (?:can't allocate|not enough) memory"),  # the second on Windows
    # The message could not be built, for lack of NVML; other asserts of that file are bugs.
    (Verdict.OOM, r"NVML_SUCCESS == \w+ INTERNAL ASSERT FAILED at \S*(?:CUDA|HIP)CachingAllocator\.cpp"),
    # Any other refusal of the operating system.
    (Verdict.HOST, r"Cannot allocate memory"),
    (Verdict.CAP, r"\bINT_MAX\b|numeric_limits<u?int(?:32_t)?>::max|32-bit index|canUse32BitIndexMath"),
    (Verdict.CAP, r"[Tt]ensor (?:is )?too large|Output size is too large|input too large or too many"),
    (Verdict.CAP, r"too large for the channels_last|too large to fit into an? \w*(?:int|INT)\b"),
    (Verdict.CAP, r"sizes too large for THCDeviceTensor|does not support batch size or num_heads greater"),
    (Verdict.CAP, r": invalid configuration argument"),  # a grid larger than the device can launch
    # Handles, workspaces and kernels that a library allocates for itself.
    (Verdict.AMBIGUOUS, r"\bCU[A-Z]+_(?:STATUS_)?(?:NOT_INITIALIZED|EXEC(?:UTION)?_FAILED|INTERNAL_ERROR)"),
    (Verdict.AMBIGUOUS, r"\bCUDNN_STATUS_NOT_SUPPORTED|cusolver error: 7\b"),
    (Verdict.AMBIGUOUS, r"Unable to find a valid cuDNN algorithm|was unable to find an engine"),
    (
        Verdict.AMBIGUOUS,
        r"No valid execution plans built|Workspace size is too large|Not enough memory for workspace",
    ),
    (Verdict.AMBIGUOUS, r"ERROR_OUT_OF_RESOURCES"),
    (Verdict.AMBIGUOUS, r"aoti_torch_\w+\(.*API call failed"),  # the out-of-memory text went to stderr
    (Verdict.AMBIGUOUS, r"during capture|StreamCaptureInvalidated|stream is capturing"),
)

_WORKER = "in DataLoader worker process"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def classify(error: BaseException) -> Verdict:
    """
    Return what *error* means; what is not known is `Verdict.NO`.

    An error that lost the device is FATAL wherever in the chain it stands. Else the
    exception itself decides, then the one that it wraps: its ``inner_exception``, or
    the ``__cause__`` of a `RuntimeError`, since ``raise RuntimeError(...) from error``
    is how frameworks pass an error on. What merely was raised while another was
    handled is an error of its own, and so is a ``ValueError(...) from error``. In a
    group the gravest member decides.

    Args:
        error: Any exception, also one without arguments and one whose chain has a cycle.

    Example:
        >>> classify(RuntimeError("CUDA error: invalid configuration argument"))
        <Verdict.CAP: 'size limit'>

    Note:
        Pinned memory that a step allocates by itself fails as "CUDA error: out of
        memory" too, and counts as OOM.
    """
    return _decide(error)[0]


def is_oom(error: BaseException) -> bool:
    """
    Say whether *error* means that the device's memory ran out.

    True for every back end and also where the out-of-memory error is wrapped, as
    `torch.compile` does. False for size limits, host memory, errors that lost the
    device, and those which have memory as only one of several causes.

    Args:
        error: Any exception.

    Example:
        >>> is_oom(RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GiB)"))
        True
        >>> is_oom(MemoryError())
        False
    """
    return classify(error) is Verdict.OOM


def explain(error: BaseException) -> str:
    r"""
    Return the one line that says what happened, for logs and reports.

    It is the line of the exception that decided the verdict, not of one that wraps
    it; its class's name where it has no text.

    Args:
        error: Any exception.

    Example:
        >>> explain(RuntimeError("The operation failed.\nRuntimeError: CUDA out of memory."))
        'RuntimeError: CUDA out of memory.'
        >>> explain(MemoryError())
        'MemoryError'
    """
    verdict, speaker = _decide(error)
    lines = [line.strip() for line in _text(speaker).splitlines() if line.strip()]
    said = [line for line in lines if _read(line) is verdict]
    return (said or lines or [type(speaker).__name__])[0]


def is_fragmented(error: BaseException) -> bool:
    """
    Say whether memory that PyTorch had reserved and not used would have held the request.

    Read from the numbers of the message itself; False where it has none. Then the
    same size may well pass once the cache has been emptied.

    Args:
        error: Any exception.

    Example:
        >>> text = "XPU out of memory. Tried to allocate 2 GiB. 3 GiB is reserved by PyTorch but unallocated."
        >>> is_fragmented(torch.OutOfMemoryError(text))
        True
    """
    verdict, speaker = _decide(error)
    text = _text(speaker)
    asked = _size(rf"Tried to allocate {_SIZE}", text)
    if verdict is not Verdict.OOM or asked is None:
        return False
    unused = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    if unused is None:  # the older wording
        reserved = _size(rf"{_SIZE} reserved in total by PyTorch", text)
        allocated = _size(rf"{_SIZE} already allocated", text)
        if reserved is None or allocated is None:
            return False
        unused = reserved - allocated
    return unused >= asked


def let_go(error: BaseException) -> None:
    """
    Drop the frames that *error* and its whole chain hold, and with them their tensors.

    A caught exception keeps the local variables of every frame it came through; until
    they are gone the memory that ran out can't be freed. The exceptions stay, with
    their texts. Frames that still run are left alone, and so are generators that go on.

    Args:
        error: A caught exception that is not going to be raised again.
    """
    chain = list(_chain(error))
    for link in chain:
        for frame, _ in traceback.walk_tb(link.__traceback__):
            # Before Python 3.13, clearing the frame of a suspended generator ends the generator.
            if not frame.f_code.co_flags & _RESUMABLE:
                with contextlib.suppress(RuntimeError):  # the frame still runs
                    frame.clear()
    for link in chain:
        link.with_traceback(None)  # an assignment would fail on a frozen dataclass
        if "TorchDynamoException" in _names(link):
            # It also holds the compiler's frames and graph, and with them the step's inputs.
            vars(link).update(first_useful_frame=None, _torch_dynamo_tracer_output=None)


def _decide(error: BaseException) -> tuple[Verdict, BaseException]:
    """Return what *error* means, and the exception in its chain that says so."""
    if not isinstance(error, Exception | BaseExceptionGroup):
        return Verdict.NO, error  # KeyboardInterrupt and SystemExit are orders
    for link in _chain(error):
        if _own(link) is Verdict.FATAL:
            return Verdict.FATAL, link
    return _unwrap(error, frozenset())


def _unwrap(error: BaseException, above: frozenset[int]) -> tuple[Verdict, BaseException]:
    """Follow what *error* wraps, except what stands in *above*; the innermost that says the same speaks."""
    verdict, speaker = Verdict.NO, error
    link: BaseException | None = error
    while link is not None and id(link) not in above:
        above |= {id(link)}
        if isinstance(link, BaseExceptionGroup):
            members = [_unwrap(member, above) for member in link.exceptions]
            own, source = min(members, key=lambda member: _GRAVEST_FIRST.index(member[0]))
        else:
            own, source = _own(link), link
        if own is not Verdict.NO and verdict in {Verdict.NO, own}:
            verdict, speaker = own, source
        link = _wrapped(link)
    return verdict, speaker


def _wrapped(error: BaseException) -> BaseException | None:
    """Return the exception that *error* passes on."""
    if isinstance(error, OOMGuardError):
        return None  # these speak for themselves
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return inner
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return error.__cause__
    if "BackendCompilerFailed" in _names(error):
        return error.__context__  # raised in place of the one that it handles
    return None


def _own(error: BaseException) -> Verdict:
    """Return what *error* alone means, without what it wraps."""
    if isinstance(error, OOMGuardError):
        return Verdict.OOM if isinstance(error, torch.OutOfMemoryError) else Verdict.NO
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return Verdict.HOST
    if not isinstance(error, RuntimeError):
        return Verdict.NO
    names = _names(error)
    if "DistBackendError" in names:
        return Verdict.FATAL
    text = _text(error)
    verdict = _CODES.get(getattr(error, "error_code", 0)) if "AcceleratorError" in names else None
    verdict = verdict or _read(text)
    if verdict is None:
        verdict = Verdict.OOM if isinstance(error, torch.OutOfMemoryError) else Verdict.NO
    if verdict in {Verdict.OOM, Verdict.AMBIGUOUS} and _WORKER in text:
        return Verdict.HOST
    return verdict


def _names(error: BaseException) -> set[str]:
    """Return the names of the classes of *error*: not every PyTorch has or imports them all."""
    return {base.__name__ for base in type(error).__mro__}


def _read(text: str) -> Verdict | None:
    """Return what *text* says, None if nothing."""
    return next((verdict for verdict, pattern in _TEXTS if re.search(pattern, text)), None)


def _text(error: BaseException) -> str:
    """Return the message of *error*, whatever its arguments are."""
    with contextlib.suppress(Exception):  # a class whose __str__ fails has no message
        return str(error)
    return ""


def _size(pattern: str, text: str) -> int | None:
    """Return the bytes that *pattern*, which ends or begins with a size, finds in *text*."""
    found = re.search(pattern, text)
    return None if found is None else int(float(found[1]) * 1024 ** _UNITS.index(found[2]))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield *error* and every exception that can be reached from it, each once."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        link = waiting.pop()
        if isinstance(link, BaseException) and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [link.__cause__, link.__context__, getattr(link, "inner_exception", None)]
            waiting += link.exceptions if isinstance(link, BaseExceptionGroup) else ()
