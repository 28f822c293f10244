"""What each known error means, whatever it is wrapped in, and what a caught one holds."""

import errno
import gc
import weakref

import pytest
import torch

from oomguard.errors import BatchLimitError, RestoreError, SplitError
from oomguard.memory.oom import Verdict, classify, explain, is_fragmented, is_oom, let_go

OOM, CAP, HOST, NO, FATAL, AMBIGUOUS = (
    Verdict.OOM,
    Verdict.CAP,
    Verdict.HOST,
    Verdict.NO,
    Verdict.FATAL,
    Verdict.AMBIGUOUS,
)
OutOfMemoryError = torch.OutOfMemoryError

CUDA_ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
NEW_WORDING = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 16.00 GiB of which 9.40 "
    "GiB is free. Of the allocated memory 2.15 GiB is allocated by PyTorch, and {unused} is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLD_WORDING = (
    "CUDA out of memory. Tried to allocate {asked} (GPU 0; 10.76 GiB total capacity; {allocated} already "
    "allocated; 4.66 GiB free; {reserved} reserved in total by PyTorch)"
)
ASYNC = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 0 bytes\nRequested               : 4096.00 GiB\n"
    "Device limit            : 16.00 GiB\nFree (according to CUDA): 15.71 GiB"
)
PREEMPTED = (
    "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
    "per_process_memory_fraction limit. Requested size: 1.00 GiB"
)
NVML = 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/{}.cpp":{}, please report a bug to PyTorch.'
CUDNN_CONTIGUOUS = (
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4611686018427387904 bytes. Error code 12 (Cannot allocate memory)"
)
BUS_ERROR = (
    "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers are "
    "out of shared memory. Please try to raise your shared memory limit."
)
CAUGHT = "Caught {} in {}.\nOriginal Traceback (most recent call last):\n  File 'a.py', line 3\n{}"
CUDA_OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


class ArrayMemoryError(MemoryError):
    """Like NumPy's: two arguments and a text of its own."""

    def __str__(self):
        return f"Unable to allocate 8.00 GiB for an array with shape {self.args[0]}"


class DistBackendError(RuntimeError):
    """Stands in for that of `torch.distributed`, which not every build has."""


class OutOfResources(Exception):  # noqa: N818
    """Triton's: an `Exception`, not a `RuntimeError`."""


class BackendCompilerFailed(RuntimeError):  # noqa: N818
    """Built as torch.compile builds its own, which takes long to import."""

    def __init__(self, inner_exception):
        super().__init__(f"backend='inductor' raised:\n{type(inner_exception).__name__}: {inner_exception}")
        self.inner_exception = inner_exception


class UnprintableError(RuntimeError):
    def __str__(self):
        return self.args[0]


def accelerator_error(text, code=None):
    error = torch.AcceleratorError(text + CUDA_ADVICE)
    if code is not None:
        error.error_code = code
    return error


# A25 (killed), A31 (wrong values), A45 (aborted), A46 (other libraries) and A47 (slow) raise nothing that
# could be classified. A19 has no known text; it stands here with the texts of its kind.
TEXTS = [
    ("A1", OutOfMemoryError, NEW_WORDING.format(asked="2.00 GiB", unused="3.10 GiB"), OOM),
    (
        "A1",
        RuntimeError,
        OLD_WORDING.format(asked="2.00 GiB", allocated="4.79 GiB", reserved="4.83 GiB"),
        OOM,
    ),
    ("A2", OutOfMemoryError, "CUDA out of memory. Tried to allocate more than 1EB memory.", AMBIGUOUS),
    ("A2", RuntimeError, "Storage size calculation overflowed with sizes=[4611686018427387904]", AMBIGUOUS),
    (
        "A2",
        RuntimeError,
        "alloc_cpu() seems to have been called with negative number: 18446744071562067968",
        AMBIGUOUS,
    ),
    (
        "A3",
        OutOfMemoryError,
        PREEMPTED,
        OOM,
    ),
    ("A3", OutOfMemoryError, CUDA_OOM + " 13.41 GiB is free. 3.20 GiB allowed; Of the allocated memory", OOM),
    ("A4", OutOfMemoryError, ASYNC, OOM),
    ("A4", RuntimeError, ASYNC, OOM),
    ("A5", RuntimeError, "CUDA error: out of memory" + CUDA_ADVICE, OOM),
    ("A5", torch.AcceleratorError, "CUDA error: out of memory" + CUDA_ADVICE, OOM),
    (
        "A5",
        RuntimeError,
        "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCStorage.cu:58",
        OOM,
    ),
    ("A5", RuntimeError, "Triton Error [CUDA]: out of memory", OOM),
    ("A5", RuntimeError, "HIP error: out of memory", OOM),
    ("A7", RuntimeError, "CUDA driver error: out of memory", OOM),
    ("A8", RuntimeError, NVML.format("CUDACachingAllocator", 838), OOM),
    ("A8", RuntimeError, NVML.format("CUDACachingAllocator", 1154), OOM),
    ("A8", RuntimeError, NVML.format("HIPCachingAllocator", 995), OOM),
    ("A8", RuntimeError, NVML.format("CUDAFunctions", 838), NO),
    (
        "A8",
        RuntimeError,
        'params.err == cudaErrorMemoryAllocation INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1798',
        NO,
    ),
    ("A9", RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", OOM),
    ("A9", RuntimeError, "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", OOM),
    ("A9", RuntimeError, "cuFFT error: CUFFT_ALLOC_FAILED", OOM),
    ("A9", RuntimeError, "CURAND_STATUS_ALLOCATION_FAILED", OOM),
    (
        "A10",
        RuntimeError,
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        AMBIGUOUS,
    ),
    (
        "A10",
        RuntimeError,
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
        AMBIGUOUS,
    ),
    ("A11", RuntimeError, CUDNN_CONTIGUOUS, AMBIGUOUS),
    ("A12", RuntimeError, "Unable to find a valid cuDNN algorithm to run convolution", AMBIGUOUS),
    ("A13", RuntimeError, "GET was unable to find an engine to execute this computation", AMBIGUOUS),
    ("A13", RuntimeError, "FIND was unable to find an engine to execute this computation", AMBIGUOUS),
    ("A13", RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", OOM),
    ("A13", RuntimeError, "MIOpen error: miopenStatusAllocFailed", OOM),
    ("A9", RuntimeError, "rocBLAS error: rocblas_status_memory_error", OOM),
    (
        "A14",
        RuntimeError,
        "cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.",
        AMBIGUOUS,
    ),
    ("A14", RuntimeError, "[cudnn_frontend] Error: Workspace size is too large.", AMBIGUOUS),
    ("A14", RuntimeError, "Not enough memory for workspace!", AMBIGUOUS),
    ("A15", RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", AMBIGUOUS),
    ("A15", RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", OOM),
    ("A15", RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", OOM),
    ("A17", RuntimeError, "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR", AMBIGUOUS),
    ("A17", torch.linalg.LinAlgError, "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR", AMBIGUOUS),
    ("A17", RuntimeError, "cusolver error: 7, when calling `cusolverDnCreate(handle)`", AMBIGUOUS),
    ("A17", RuntimeError, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED", OOM),
    (
        "A19",
        RuntimeError,
        "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseSpMM(handle)`",
        OOM,
    ),
    (
        "A19",
        RuntimeError,
        "CUDA error: CUSPARSE_STATUS_INTERNAL_ERROR when calling `cusparseSpMM(handle)`",
        AMBIGUOUS,
    ),
    ("A20", DistBackendError, "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error", FATAL),
    ("A20", DistBackendError, "Last error: Failed to CUDA calloc async 608 bytes. CUDA out of memory", FATAL),
    ("A20", RuntimeError, "NCCL WARN Cuda failure 2 'out of memory'", FATAL),
    ("A20", RuntimeError, "ncclUnhandledCudaError: Call to CUDA function failed: out of memory", FATAL),
    ("A21", RuntimeError, CPU, OOM),
    ("A21", RuntimeError, "DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes.", OOM),
    (
        "A23",
        RuntimeError,
        "unable to mmap 64 bytes from file </torch_7_2>: Cannot allocate memory (12)",
        HOST,
    ),
    ("A23", RuntimeError, "unable to write to file </torch_71_2883>: No space left on device (28)", HOST),
    (
        "A23",
        RuntimeError,
        "unable to allocate shared memory(shm) for file </torch_71>: unavailable (11)",
        HOST,
    ),
    ("A24", MemoryError, "std::bad_alloc", HOST),
    ("A24", RuntimeError, "std::bad_alloc", HOST),
    ("A26", RuntimeError, BUS_ERROR, HOST),
    ("A26", RuntimeError, "DataLoader worker (pid 71) is killed by signal: Killed. ", HOST),
    ("A26", RuntimeError, "DataLoader worker (pid(s) 71, 72) exited unexpectedly", HOST),
    ("A26", RuntimeError, "DataLoader worker (pid 71) is killed by signal: Segmentation fault. ", NO),
    ("A27", RuntimeError, "CUDA error: an illegal memory access was encountered" + CUDA_ADVICE, FATAL),
    ("A27", torch.AcceleratorError, "CUDA error: device-side assert triggered" + CUDA_ADVICE, FATAL),
    ("A27", RuntimeError, "CUDA error: misaligned address", FATAL),
    ("A27", RuntimeError, "CUDA error: unspecified launch failure", FATAL),
    ("A27", RuntimeError, "CUDA error: an illegal instruction was encountered", FATAL),
    ("A27", RuntimeError, "CUDA error: the launch timed out and was terminated", FATAL),
    ("A27", RuntimeError, "CUDA error: uncorrectable ECC error encountered", FATAL),
    ("A27", RuntimeError, "CUDA error: hardware stack error", FATAL),
    ("A27", RuntimeError, "CUDA error: invalid program counter", FATAL),
    ("A27", RuntimeError, "CUDA error: context is destroyed", FATAL),
    ("A27", RuntimeError, "CUDA error: operation not supported on global/shared address space", FATAL),
    ("A27", RuntimeError, "HIP error: an illegal memory access was encountered", FATAL),
    ("A28", RuntimeError, "CUDA error: invalid configuration argument" + CUDA_ADVICE, CAP),
    ("A28", RuntimeError, "CUDA error (csrc/attention.cu:12): invalid configuration argument", CAP),
    (
        "A29",
        RuntimeError,
        "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.",
        CAP,
    ),
    ("A29", RuntimeError, "input tensor must fit into 32-bit index math", CAP),
    (
        "A29",
        RuntimeError,
        "Expected output.numel() <= std::numeric_limits<int32_t>::max() to be true, but got false.",
        CAP,
    ),
    (
        "A30",
        RuntimeError,
        "upsample_nearest_nhwc only supports output tensors with less than INT_MAX elements, but got [3]",
        CAP,
    ),
    ("A30", RuntimeError, "cub sort does not support sorting more than INT_MAX elements", CAP),
    ("A30", RuntimeError, "The dimension being sorted can not have more than INT_MAX elements.", CAP),
    ("A30", RuntimeError, "cuDNN SDPA does not support batch size or num_heads greater than 65535", CAP),
    ("A30", RuntimeError, "add: Argument #0: tensor too large or too many (>25) dimensions", CAP),
    ("A30", RuntimeError, "N > 0 && N <= std::numeric_limits<int32_t>::max() INTERNAL ASSERT FAILED", CAP),
    ("A30", RuntimeError, "THCudaTensor sizes too large for THCDeviceTensor conversion", CAP),
    ("A30", RuntimeError, "Output size is too large.", CAP),
    ("A30", RuntimeError, "_sparse_sum_backward_cuda: input too large or too many dimensions", CAP),
    ("A30", RuntimeError, "input (4294967296) is too large for the channels_last CUDA kernel launch", CAP),
    ("A30", RuntimeError, "quantile() input tensor is too large", CAP),
    ("A30", RuntimeError, "batch (3000000000) is too large to fit into a int (32 bits)", CAP),
    (
        "A33",
        OutOfResources,
        "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes",
        NO,
    ),
    ("A33", RuntimeError, "No valid triton configs. OutOfMemoryError: out of resource: triton_mm", NO),
    ("A33", RuntimeError, "Triton Error [CUDA]: out of shared memory", NO),
    ("A35", RuntimeError, f"backend='inductor' raised:\nOutOfMemoryError: {CUDA_OOM}", OOM),
    (
        "A36",
        RuntimeError,
        "aoti_torch_empty_strided(2, size) API call failed at /tmp/c/main.cpp, line 81",
        AMBIGUOUS,
    ),
    (
        "A37",
        RuntimeError,
        f"The following operation failed in the TorchScript interpreter.\nRuntimeError: {CUDA_OOM}",
        OOM,
    ),
    (
        "A37",
        RuntimeError,
        f"The following operation failed in the TorchScript interpreter.\nRuntimeError: {CPU}",
        OOM,
    ),
    ("A38", OutOfMemoryError, CAUGHT.format("OutOfMemoryError", "replica 0 on device 0", CUDA_OOM), OOM),
    ("A38", OutOfMemoryError, CAUGHT.format("OutOfMemoryError", "replica 0 on device 0", ASYNC), OOM),
    ("A38", RuntimeError, CAUGHT.format("RuntimeError", "DataLoader worker process 0", CUDA_OOM), HOST),
    (
        "A38",
        OutOfMemoryError,
        CAUGHT.format("OutOfMemoryError", "DataLoader worker process 0", CUDA_OOM),
        HOST,
    ),
    ("A38", MemoryError, CAUGHT.format("MemoryError", "DataLoader worker process 0", ""), HOST),
    ("A38", RuntimeError, CAUGHT.format("RuntimeError", "DataLoader worker process 0", "shapes differ"), NO),
    ("A38", ValueError, CAUGHT.format("ValueError", "DataLoader worker process 0", "no such file"), NO),
    ("A38", RuntimeError, "Caught RuntimeError in pin memory thread for device 0.", HOST),
    (
        "A38",
        torch.AcceleratorError,
        CAUGHT.format("AcceleratorError", "pin memory thread for device 0", "CUDA error: out of memory"),
        HOST,
    ),
    (
        "A38",
        RuntimeError,
        CAUGHT.format("RuntimeError", "pin memory thread for device 0", "CUDA error: device-side assert triggered"),
        FATAL,
    ),
    ("A39", RuntimeError, "CUDA error: operation failed due to a previous error during capture", AMBIGUOUS),
    ("A39", RuntimeError, "CUDA error: cudaErrorStreamCaptureInvalidated", AMBIGUOUS),
    ("A39", RuntimeError, "CUDA error: operation not permitted when stream is capturing", AMBIGUOUS),
    ("A40", RuntimeError, "Error out of memory at line 380 in file /csrc/pythonInterface.c", FATAL),
    ("A40", RuntimeError, "Error out of memory at line 90 in file /csrc/ops.cu", FATAL),
    ("A42", OutOfMemoryError, "HIP out of memory. Tried to allocate 2.00 GiB.", OOM),
    ("A42", RuntimeError, "HIP out of memory. Tried to allocate 2.00 GiB.", OOM),
    ("A43", OutOfMemoryError, "XPU out of memory. Tried to allocate 2.00 GiB.", OOM),
    ("A43", RuntimeError, "XPU out of memory. Tried to allocate 2.00 GiB.", OOM),
    (
        "A43",
        RuntimeError,
        "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
        AMBIGUOUS,
    ),
    ("A43", RuntimeError, "UR backend returns:39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", OOM),
    ("A43", RuntimeError, "UR backend returns:38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)", HOST),
    ("A43", RuntimeError, "Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)", AMBIGUOUS),
    (
        "A43",
        RuntimeError,
        "Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        FATAL,
    ),
    ("A44", RuntimeError, "MPS backend out of memory (MPS allocated: 8.00 GiB, max allowed: 9.07 GiB).", OOM),
    ("another", RuntimeError, "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total)", OOM),
    ("another", RuntimeError, "CUDA ran out of memory outside PyTorch's allocator.", OOM),
    ("another", RuntimeError, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes", OOM),
]

OTHERS = [
    IndexError("index 7 is out of bounds for dimension 0 with size 3"),
    RuntimeError("index out of range in self"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("out of shared memory"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device" + CUDA_ADVICE),
    RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"),
    RuntimeError("Kernel height x width product is too large: kernel_height=9"),
    RuntimeError("the cache of this model is out of memory slots"),
    ValueError("CUDA out of memory"),
    ValueError("the cuda device has too little memory"),
    RuntimeError(),
    RuntimeError(12, None),
    RuntimeError(b"CUDA"),
    UnprintableError(),
    StopIteration(),
    KeyError("CUDA out of memory"),
    KeyboardInterrupt(CUDA_OOM),
    SystemExit(CUDA_OOM),
]


def chained(error, *, cause=None, context=None, suppress=False):
    error.__cause__ = cause
    error.__context__ = context
    error.__suppress_context__ = suppress or cause is not None
    return error


@pytest.mark.parametrize(
    ("make", "text", "verdict"),
    [pytest.param(*rest, id=f"{row}-{number}") for number, (row, *rest) in enumerate(TEXTS)],
)
def test_texts(make, text, verdict):
    assert classify(make(text)) is verdict
    assert is_oom(make(text)) is (verdict is OOM)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_what_is_not_known_is_not_memory(error):
    assert classify(error) is NO
    assert not is_oom(error)


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(2, OOM), (9, CAP), (700, FATAL), (710, FATAL), (716, FATAL), (719, FATAL), (901, AMBIGUOUS), (98, NO)],
)
def test_an_accelerator_error_is_judged_by_its_code(code, verdict):
    assert classify(accelerator_error("CUDA error: some text", code)) is verdict


def test_an_error_code_of_another_class_says_nothing():
    error = RuntimeError("the server answered")
    error.error_code = 2
    assert classify(error) is NO


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_the_real_error_of_a_communicator_is_fatal():
    assert classify(torch.distributed.DistBackendError("unhandled cuda error")) is FATAL


@pytest.mark.parametrize(
    "error",
    [MemoryError(), ArrayMemoryError((2**30,), "float64"), OSError(errno.ENOMEM, "Cannot allocate memory")],
    ids=repr,
)
def test_errors_of_host_memory(error):
    assert classify(error) is HOST


def test_the_cpu_refusing_an_absurd_size_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert "DefaultCPUAllocator: can't allocate memory" in str(caught.value)
    assert is_oom(caught.value)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (BatchLimitError("oomguard: batch size 1 does not fit"), OOM),
        (SplitError("oomguard: can't run in pieces"), OOM),
        (RestoreError(f"oomguard: can't put back; the first error was {CUDA_OOM}"), NO),
        (chained(RestoreError("oomguard: can't put back"), cause=OutOfMemoryError(CUDA_OOM)), NO),
        (chained(BatchLimitError("oomguard: x"), cause=RuntimeError(CUDNN_CONTIGUOUS)), OOM),
    ],
)
def test_own_errors_speak_for_themselves(error, verdict):
    assert classify(error) is verdict
    assert explain(error) == str(error)


def test_the_compilers_error_is_what_it_wraps():
    assert classify(BackendCompilerFailed(OutOfMemoryError(ASYNC))) is OOM
    assert classify(BackendCompilerFailed(BackendCompilerFailed(OutOfMemoryError("")))) is OOM
    assert classify(BackendCompilerFailed(MemoryError())) is HOST
    assert classify(BackendCompilerFailed(OutOfResources("out of resource: shared memory"))) is NO
    assert classify(BackendCompilerFailed(ValueError("shape"))) is NO


def test_the_compilers_error_without_inner_exception_is_what_it_was_raised_for():
    error = chained(BackendCompilerFailed("gone in transport"), context=OutOfMemoryError(""))
    assert classify(error) is OOM


def test_a_runtime_error_raised_from_another_is_the_other():
    assert classify(chained(RuntimeError("step 3 failed"), cause=OutOfMemoryError(ASYNC))) is OOM
    assert classify(chained(RuntimeError("step 3 failed"), cause=MemoryError())) is HOST
    assert classify(chained(RuntimeError("step 3 failed"), cause=ValueError("x"))) is NO


def test_other_errors_raised_from_out_of_memory_are_their_own():
    assert classify(chained(ValueError("bad configuration"), cause=OutOfMemoryError(CUDA_OOM))) is NO


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize("make", [ValueError, RuntimeError])
def test_what_is_raised_while_handling_out_of_memory_is_its_own(make, suppress):
    error = chained(make("another mistake"), context=OutOfMemoryError(CUDA_OOM), suppress=suppress)
    assert classify(error) is NO


@pytest.mark.parametrize("link", ["cause", "context"])
def test_a_lost_device_is_fatal_wherever_it_stands(link):
    lost = RuntimeError("CUDA error: device-side assert triggered")
    below = chained(ValueError("x"), **{link: lost})
    error = chained(OutOfMemoryError(CUDA_OOM), **{link: below})
    assert classify(error) is FATAL
    assert explain(error) == str(lost)


def test_an_interrupt_is_obeyed_whatever_came_before():
    lost = RuntimeError("CUDA error: device-side assert triggered")
    assert classify(chained(KeyboardInterrupt(), context=lost)) is NO


@pytest.mark.parametrize(
    ("members", "verdict"),
    [
        ([OutOfMemoryError("a"), RuntimeError(CPU)], OOM),
        ([OutOfMemoryError("a"), ExceptionGroup("inner", [OutOfMemoryError("b")])], OOM),
        ([OutOfMemoryError("a"), RuntimeError(CUDNN_CONTIGUOUS)], AMBIGUOUS),
        ([OutOfMemoryError("a"), RuntimeError("INT_MAX")], CAP),
        ([OutOfMemoryError("a"), MemoryError()], HOST),
        ([OutOfMemoryError("a"), ValueError("b")], NO),
        ([OutOfMemoryError("a"), KeyboardInterrupt()], NO),
        ([ValueError("b"), ExceptionGroup("inner", [RuntimeError("misaligned address")])], FATAL),
    ],
)
def test_the_gravest_member_of_a_group_decides(members, verdict):
    group = BaseExceptionGroup("of a task group", members)
    assert classify(group) is verdict
    assert classify(chained(RuntimeError("step failed"), cause=group)) is verdict


def test_members_of_a_group_may_share_their_cause():
    cause = OutOfMemoryError("")
    members = [chained(RuntimeError("left"), cause=cause), chained(RuntimeError("right"), cause=cause)]
    assert classify(ExceptionGroup("both", members)) is OOM


def test_a_cycle_in_the_chain_ends():
    first, second = RuntimeError("first"), RuntimeError("second")
    chained(first, cause=second)
    chained(second, cause=first, context=second)
    group = ExceptionGroup("around", [first])
    chained(second, cause=group)
    assert classify(group) is NO
    assert classify(first) is NO
    let_go(first)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OutOfMemoryError(ASYNC), "Allocation on device 0 would exceed allowed memory. (out of memory)"),
        (BackendCompilerFailed(OutOfMemoryError(CUDA_OOM)), CUDA_OOM),
        (chained(RuntimeError(f"step 3: {CUDA_OOM}"), cause=OutOfMemoryError(CUDA_OOM)), CUDA_OOM),
        (OutOfMemoryError(CAUGHT.format("OutOfMemoryError", "replica 0", "  " + CUDA_OOM)), CUDA_OOM),
        (ExceptionGroup("group", [OutOfMemoryError(CUDA_OOM)]), CUDA_OOM),
        (chained(RuntimeError("outer"), cause=RuntimeError("inner")), "outer"),
        (ValueError("\n  too\nbad"), "too"),
        (MemoryError(), "MemoryError"),
        (OutOfMemoryError(), "OutOfMemoryError"),
        (UnprintableError(), "UnprintableError"),
    ],
)
def test_explain_is_the_line_that_says_it(error, line):
    assert explain(error) == line


@pytest.mark.parametrize(
    ("text", "fragmented"),
    [
        (NEW_WORDING.format(asked="2.00 GiB", unused="3.10 GiB"), True),
        (NEW_WORDING.format(asked="2.00 GiB", unused="2.00 GiB"), True),
        (NEW_WORDING.format(asked="2.00 GiB", unused="1.99 GiB"), False),
        (NEW_WORDING.format(asked="2.00 GiB", unused="150.00 MiB"), False),
        (NEW_WORDING.format(asked="20.00 MiB", unused="1.00 GiB"), True),
        (NEW_WORDING.format(asked="512 bytes", unused="0 bytes"), False),
        (OLD_WORDING.format(asked="2.00 GiB", allocated="4.79 GiB", reserved="4.83 GiB"), False),
        (OLD_WORDING.format(asked="20.00 MiB", allocated="4.79 GiB", reserved="4.83 GiB"), True),
        (
            "XPU out of memory. Tried to allocate 2.00 GiB. 3.00 GiB is reserved by PyTorch but unallocated.",
            True,
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. 3.00 GiB reserved in total by PyTorch", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 4.79 GiB already allocated)", False),
        ("CUDA out of memory. 3.00 GiB is reserved by PyTorch but unallocated.", False),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", False),
        ("MPS backend out of memory (MPS allocated: 8.00 GiB). Tried to allocate 2.00 GiB", False),
        (ASYNC, False),
        (CPU, False),
    ],
)
def test_fragmentation_is_read_from_the_numbers(text, fragmented):
    assert is_fragmented(RuntimeError(text)) is fragmented
    assert is_fragmented(BackendCompilerFailed(OutOfMemoryError(text))) is fragmented


def test_an_error_that_is_not_out_of_memory_is_not_fragmented():
    text = NEW_WORDING.format(asked="2.00 GiB", unused="3.10 GiB")
    assert not is_fragmented(ValueError(text))


def fail(alive):
    activation = torch.ones(3)
    alive.append(weakref.ref(activation))
    raise OutOfMemoryError(CUDA_OOM)


def plain(alive):
    fail(alive)


def from_cause(alive):
    try:
        fail(alive)
    except OutOfMemoryError as error:
        raise RuntimeError("step failed") from error


def in_context(alive):
    try:
        fail(alive)
    except OutOfMemoryError:
        raise ValueError("another mistake")  # noqa: B904


def inside(alive):
    try:
        fail(alive)
    except OutOfMemoryError as error:
        raised = BackendCompilerFailed(error)
    raise raised


def grouped(alive):
    errors = []
    for _ in range(2):
        try:
            fail(alive)
        except OutOfMemoryError as error:
            errors.append(error)
    raise ExceptionGroup("both", errors)


@pytest.mark.parametrize("step", [plain, from_cause, in_context, inside, grouped])
def test_let_go_frees_the_tensors_of_failed_frames(step):
    alive = []
    kept = None
    try:
        step(alive)
    except Exception as error:  # noqa: BLE001
        kept = error
    assert all(tensor() is not None for tensor in alive)
    gc.disable()
    try:
        let_go(kept)
        assert alive
        assert all(tensor() is None for tensor in alive)
    finally:
        gc.enable()
    assert explain(kept)


def test_let_go_frees_tensors_though_somebody_else_holds_the_traceback():
    alive = []
    with pytest.raises(OutOfMemoryError) as caught:
        fail(alive)
    held = caught.value.__traceback__
    let_go(caught.value)
    assert held is not None
    assert alive[0]() is None


def test_let_go_frees_the_inputs_of_a_step_that_failed_to_compile():
    alive = []

    def backend(_graph, _inputs):
        fail(alive)

    def step():
        batch = torch.ones(3)
        alive.append(weakref.ref(batch))
        return torch.compile(lambda x: x + 1, backend=backend)(batch)

    kept = None
    try:  # `pytest.raises` would hold the traceback
        step()
    except RuntimeError as error:
        kept = error
    assert type(kept).__name__ == "BackendCompilerFailed"
    assert explain(kept) == CUDA_OOM
    assert all(tensor() is not None for tensor in alive)
    let_go(kept)
    assert len(alive) == 2
    assert all(tensor() is None for tensor in alive)


def test_let_go_leaves_running_frames_and_the_text_alone():
    mine = torch.ones(3)
    with pytest.raises(OutOfMemoryError) as caught:
        fail([])
    let_go(caught.value)
    assert caught.value.__traceback__ is None
    assert str(caught.value) == CUDA_OOM
    assert mine.sum() == 3


def test_let_go_does_not_end_a_suspended_generator():
    caught = []

    def batches():
        try:
            fail([])
        except OutOfMemoryError as error:
            caught.append(error)
        yield 1
        yield 2

    generator = batches()
    next(generator)
    let_go(caught[0])
    assert list(generator) == [2]
