// The driver (libcuda) and the management library (libnvidia-ml), as far as PyTorch and Triton ask them.
//
// The memory that expandable segments are made of lives here: addresses are reserved first, then backed piece by
// piece. Each piece is counted against its device from its creation until it is both released and unmapped.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda.h"
#include "cuda_runtime_api.h"
#include "memory.h"

static long object[64];  // stands for every context, module and function

// ---- memory in pieces ---------------------------------------------------------------

typedef struct {
  size_t bytes;
  int device, references;
} Piece;

static void let_go(Piece *piece) {
  if (__sync_sub_and_fetch(&piece->references, 1)) return;
  give(piece->device, piece->bytes);
  free(piece);
}

CUresult cuMemGetAllocationGranularity(size_t *granule, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
  *granule = GRANULE;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
  Range range = {.bytes = bytes, .kind = ADDRESSES, .backing = calloc(bytes / GRANULE, sizeof(void *))};
  if (!range.backing) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!new_range(&range)) {
    free(range.backing);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *start = (CUdeviceptr)range.start;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
  Range ended;
  if (!end_range((void *)start, &ended)) return CUDA_ERROR_INVALID_VALUE;
  free(ended.backing);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  int device = properties->location.id;
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  if (!take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  Piece *piece = malloc(sizeof *piece);
  *piece = (Piece){bytes, device, 1};
  *handle = (CUmemGenericAllocationHandle)piece;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  let_go((Piece *)handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  Range range;
  Piece *piece = (Piece *)handle;
  if (!find_range((void *)at, &range) || range.kind != ADDRESSES) return CUDA_ERROR_INVALID_VALUE;
  __sync_add_and_fetch(&piece->references, 1);
  range.backing[((char *)at - range.start) / GRANULE] = piece;
  own_range((void *)at, piece->device);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  Range range;
  if (!find_range((void *)at, &range) || range.kind != ADDRESSES) return CUDA_ERROR_INVALID_VALUE;
  size_t first = ((char *)at - range.start) / GRANULE;
  for (size_t i = first; i < first + bytes / GRANULE; i++) {
    if (range.backing[i]) let_go(range.backing[i]);
    range.backing[i] = 0;
  }
  madvise((void *)at, bytes, MADV_DONTNEED);  // what was written there is gone, as on a device
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
  Range range;
  if (!find_range((void *)address, &range)) return CUDA_ERROR_INVALID_VALUE;
  if (start) *start = (CUdeviceptr)range.start;
  if (bytes) *bytes = range.bytes;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  *(CUdeviceptr *)value = address;
  return CUDA_SUCCESS;
}

// ---- devices, contexts, modules -------------------------------------------------------

CUresult cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int *count) {
  *count = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return ordinal < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);  // numbered alike
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)object;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, 0); }

CUresult cuCtxGetDevice(CUdevice *device) { return (CUresult)cudaGetDevice(device); }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)object;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)object;
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options, void **values, unsigned count,
                           CUlibraryOption *library_options, void **library_values, unsigned library_count) {
  *library = (CUlibrary)object;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
  *kernel = (CUkernel)object;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
  *blocks = 2;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : error ? "error of oomguard's fake GPU" : "no error";
  return CUDA_SUCCESS;
}

// ---- management: without it a machine that has a real card would count that one -----------

typedef struct {
  unsigned pid;
  unsigned long long used;
} Process;

enum { NVML_SUCCESS = 0, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6 };

int nvmlInit(void) { return NVML_SUCCESS; }
int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlShutdown(void) { return NVML_SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = device_count();
  return NVML_SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return cudaDriverGetVersion(version); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  unsigned domain, bus;
  if (sscanf(id, "%x:%x", &domain, &bus) != 2 || bus >= (unsigned)device_count()) return NVML_NOT_FOUND;
  *device = (void *)(uintptr_t)bus;
  return NVML_SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, Process *processes) {
  if (*count >= 1) processes[0] = (Process){getpid(), used_of((int)(uintptr_t)device)};
  *count = 1;
  return NVML_SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return NVML_NOT_SUPPORTED; }
