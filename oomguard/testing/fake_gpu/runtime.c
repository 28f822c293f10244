// A CUDA runtime with memory but no arithmetic: what libcudart answers to PyTorch.
//
// Copies between host and device are real, kernels are not run. What isn't here
// is filled up at build time with functions that only say "success".
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"
#include "memory.h"

static __thread int current_device;
static __thread cudaError_t last_error;

static cudaError_t report(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

// ---- memory -----------------------------------------------------------------

cudaError_t cudaMalloc(void **out, size_t bytes) {
  Range range = {.bytes = whole_granules(bytes), .kind = DEVICE_MEMORY, .device = current_device};
  *out = 0;
  if (bytes == 0) return cudaSuccess;
  if (!take(current_device, range.bytes)) return report(cudaErrorMemoryAllocation);
  if (!new_range(&range)) {
    give(current_device, range.bytes);
    return report(cudaErrorMemoryAllocation);
  }
  *out = range.start;
  return cudaSuccess;
}

cudaError_t cudaFree(void *start) {
  Range ended;
  if (start && end_range(start, &ended)) give(ended.device, ended.bytes);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) { return cudaMalloc(out, bytes); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t stream) { return cudaFree(start); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  size_t used = used_of(current_device);
  *total = capacity_of(current_device);
  *free_bytes = used < *total ? *total - used : 0;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  Range range = {.bytes = bytes ? bytes : 1, .kind = HOST_MEMORY};
  *out = 0;
  if (!new_range(&range)) return report(cudaErrorMemoryAllocation);
  *out = range.start;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *start) {
  Range ended;
  if (start) end_range(start, &ended);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  Range range;
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  if (!find_range(address, &range)) return cudaSuccess;
  attributes->type = range.kind == HOST_MEMORY ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = range.device;
  attributes->devicePointer = attributes->hostPointer = (void *)address;
  return cudaSuccess;
}

static int on_device(const void *address) {
  Range range;
  return find_range(address, &range) && range.kind != HOST_MEMORY;
}

// Between devices nothing is copied: their pages stay untouched, and so cost the host no memory.
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  if (kind == cudaMemcpyDeviceToDevice || (kind == cudaMemcpyDefault && on_device(to) && on_device(from)))
    return cudaSuccess;
  if (bytes) memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++)
    cudaMemcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  *(uint64_t *)value = 0;
  return cudaSuccess;
}

// ---- devices and errors -------------------------------------------------------

static int exists(int device) { return device >= 0 && device < device_count(); }

cudaError_t cudaGetDeviceCount(int *count) {
  *count = device_count();
  return *count ? cudaSuccess : report(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return report(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotSupported: return "operation not supported: oomguard's fake GPU can't do this";
    default: return "unknown error of oomguard's fake GPU";
  }
}

const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}

// An A100's figures. 8.0 and not 9.0, since on an H100 attention takes cuDNN's own kernels, which are built
// from operation graphs that nothing here could answer for.
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return report(cudaErrorInvalidDevice);
  switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 108; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 163 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 164 << 10; break;
    case cudaDevAttrL2CacheSize: *value = 40 << 20; break;
    case cudaDevAttrClockRate: *value = 1410000; break;
    case cudaDevAttrMemoryClockRate: *value = 1215000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  if (!exists(device)) return report(cudaErrorInvalidDevice);
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "oomguard fake GPU (memory only)");
  properties->totalGlobalMem = capacity_of(device);
  properties->pciBusID = device;
  memset(properties->uuid.bytes, device + 1, sizeof properties->uuid.bytes);
  struct {
    int *field;
    enum cudaDeviceAttr attribute;
  } same[] = {
      {&properties->major, cudaDevAttrComputeCapabilityMajor},
      {&properties->minor, cudaDevAttrComputeCapabilityMinor},
      {&properties->multiProcessorCount, cudaDevAttrMultiProcessorCount},
      {&properties->warpSize, cudaDevAttrWarpSize},
      {&properties->maxThreadsPerBlock, cudaDevAttrMaxThreadsPerBlock},
      {&properties->maxThreadsDim[0], cudaDevAttrMaxBlockDimX},
      {&properties->maxThreadsDim[1], cudaDevAttrMaxBlockDimY},
      {&properties->maxThreadsDim[2], cudaDevAttrMaxBlockDimZ},
      {&properties->maxGridSize[0], cudaDevAttrMaxGridDimX},
      {&properties->maxGridSize[1], cudaDevAttrMaxGridDimY},
      {&properties->maxGridSize[2], cudaDevAttrMaxGridDimZ},
      {&properties->maxThreadsPerMultiProcessor, cudaDevAttrMaxThreadsPerMultiProcessor},
      {&properties->maxBlocksPerMultiProcessor, cudaDevAttrMaxBlocksPerMultiprocessor},
      {&properties->regsPerBlock, cudaDevAttrMaxRegistersPerBlock},
      {&properties->regsPerMultiprocessor, cudaDevAttrMaxRegistersPerMultiprocessor},
      {&properties->l2CacheSize, cudaDevAttrL2CacheSize},
      {&properties->memoryBusWidth, cudaDevAttrGlobalMemoryBusWidth},
      {&properties->unifiedAddressing, cudaDevAttrUnifiedAddressing},
      {&properties->managedMemory, cudaDevAttrManagedMemory},
      {&properties->concurrentKernels, cudaDevAttrConcurrentKernels},
      {&properties->canMapHostMemory, cudaDevAttrCanMapHostMemory},
      {&properties->cooperativeLaunch, cudaDevAttrCooperativeLaunch},
  };
  for (size_t i = 0; i < sizeof same / sizeof *same; i++)
    cudaDeviceGetAttribute(same[i].field, same[i].attribute, device);
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 163 << 10;
  properties->sharedMemPerMultiprocessor = 164 << 10;
  properties->totalConstMem = 64 << 10;
  properties->memPitch = 2147483647;
  properties->textureAlignment = 512;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 0;  // copies between devices then go by the runtime, and no peer mapping is asked for
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int length, int device) {
  snprintf(out, length, "00000000:%02x:00.0", device);
  return cudaSuccess;
}

// ---- streams and events: names only, for nothing ever runs later ----------------

static void *fresh_name(void) {
  static long last = 16;
  return (void *)__sync_add_and_fetch(&last, 16);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  *stream = fresh_name();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return cudaStreamCreate(stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

// What the host was to do after the device is done can be done at once.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
  *event = fresh_name();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1;
  return cudaSuccess;
}

// Graphs would have to be replayed. Refused here, so that nobody waits for a capture that never begins.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return report(cudaErrorNotSupported);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

// ---- kernels: registered, never run ------------------------------------------------

static void *code[64];

void **__cudaRegisterFatBinary(void *binary) { return code; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = (dim3){1, 1, 1};
  *shared = 0;
  *(void **)stream = 0;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
  *kernel = code;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 80;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  static char any_symbol[1 << 16];
  *address = any_symbol;
  return cudaSuccess;
}

// ---- the way to the driver: by name, the newest version first ------------------------

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  char versioned[128];
  *function = 0;
  for (int i = 4; i >= 1 && !*function; i--) {
    snprintf(versioned, sizeof versioned, i > 1 ? "%s_v%d" : "%s", name, i);
    *function = dlsym(RTLD_DEFAULT, versioned);
  }
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : report(cudaErrorNotSupported);
}
