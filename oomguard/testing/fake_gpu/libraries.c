// The libraries on top of the runtime: cuBLAS, cuDNN, cuFFT.
//
// Their descriptors exist and their functions succeed. Workspaces are 0 bytes, since which algorithm a library
// would choose, and so what it would need, only a real card tells; recurrent layers are the exception (below).
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cudnn.h"

// Nothing is read from most descriptors: they only have to be there, and to go again.
#define DESCRIPTOR(status, type, make, destroy) \
  status make(type *made) {                     \
    *made = calloc(1, 256);                      \
    return 0;                                   \
  }                                             \
  status destroy(type it) {                     \
    free((void *)it);                           \
    return 0;                                   \
  }

// ---- cuBLAS and cuFFT: declared here, since their headers want ones that no package of PyTorch's brings ----

typedef struct {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
} Heuristic;

DESCRIPTOR(int, void *, cublasCreate_v2, cublasDestroy_v2)
DESCRIPTOR(int, void *, cublasLtMatmulPreferenceCreate, cublasLtMatmulPreferenceDestroy)
DESCRIPTOR(int, void *, cublasLtMatmulDescCreate, cublasLtMatmulDescDestroy)
DESCRIPTOR(int, void *, cublasLtMatrixLayoutCreate, cublasLtMatrixLayoutDestroy)

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, Heuristic *results, int *found) {
  results[0] = (Heuristic){.waves = 1};
  *found = 1;
  return 0;
}

size_t cublasLtGetVersion(void) { return 10 * CUDART_VERSION; }

int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
  *mode = 0;
  return 0;
}

int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *in_embed, long long in_stride,
                        long long in_distance, int in_type, long long *out_embed, long long out_stride,
                        long long out_distance, int out_type, long long batch, size_t *workspace, int compute) {
  *workspace = 0;
  return 0;
}

// ---- cuDNN ----------------------------------------------------------------------------

DESCRIPTOR(cudnnStatus_t, cudnnHandle_t, cudnnCreate, cudnnDestroy)
DESCRIPTOR(cudnnStatus_t, cudnnActivationDescriptor_t, cudnnCreateActivationDescriptor,
           cudnnDestroyActivationDescriptor)
DESCRIPTOR(cudnnStatus_t, cudnnCTCLossDescriptor_t, cudnnCreateCTCLossDescriptor, cudnnDestroyCTCLossDescriptor)
DESCRIPTOR(cudnnStatus_t, cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor,
           cudnnDestroyConvolutionDescriptor)
DESCRIPTOR(cudnnStatus_t, cudnnDropoutDescriptor_t, cudnnCreateDropoutDescriptor, cudnnDestroyDropoutDescriptor)
DESCRIPTOR(cudnnStatus_t, cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor)
DESCRIPTOR(cudnnStatus_t, cudnnPoolingDescriptor_t, cudnnCreatePoolingDescriptor, cudnnDestroyPoolingDescriptor)
DESCRIPTOR(cudnnStatus_t, cudnnSpatialTransformerDescriptor_t, cudnnCreateSpatialTransformerDescriptor,
           cudnnDestroySpatialTransformerDescriptor)

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t status) { return "status of oomguard's fake cuDNN"; }

cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
  *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *bytes) {
  *bytes = 1 << 20;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t operations, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t scale,
    const cudnnActivationDescriptor_t activation, size_t *bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t operations, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t scale,
    const cudnnActivationDescriptor_t activation, size_t *bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t handle, cudnnBatchNormMode_t mode,
                                                                   cudnnBatchNormOps_t operations,
                                                                   const cudnnActivationDescriptor_t activation,
                                                                   const cudnnTensorDescriptor_t x, size_t *bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}

// Convolutions: each search finds one engine configuration, with nothing to note about it and a workspace of 0 bytes.

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *made) {
  *made = calloc(1, 256);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t it) {
  free(it);
  return CUDNN_STATUS_SUCCESS;
}

static size_t width_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR: return 8;
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    default: return 4;  // enumerations, int32 and float
  }
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t asked, int64_t *count, void *values) {
  int is_note = type == CUDNN_TYPE_NUMERICAL_NOTE || type == CUDNN_TYPE_BEHAVIOR_NOTE;
  int is_made_by_caller = type == CUDNN_TYPE_BACKEND_DESCRIPTOR;
  if (count) *count = is_note ? 0 : 1;
  if (values && asked > 0 && !is_note && !is_made_by_caller) memset(values, 0, width_of(type));
  return CUDNN_STATUS_SUCCESS;
}

// ---- cuDNN, recurrent layers -------------------------------------------------------------
//
// PyTorch asks where in the flat buffer of weights each matrix lies, so this must be a true layout: pseudo-layer by
// pseudo-layer (one per layer and direction), its matrices, then its biases, without gaps. The spaces for training
// hold what the backward needs, gates and states of every position, and grow with batch and length as the true ones
// do; the true number of bytes is cuDNN's own business.

struct cudnnTensorStruct {
  cudnnDataType_t type;
  int count, sizes[CUDNN_DIM_MAX], strides[CUDNN_DIM_MAX];
};

struct cudnnRNNDataStruct {
  size_t length, batch;
};

struct cudnnRNNStruct {
  cudnnDataType_t type;
  int gates, has_bias, directions;
  size_t input, hidden, projected, layers;  // projected: what a layer puts out, hidden where nothing projects
};

DESCRIPTOR(cudnnStatus_t, cudnnRNNDataDescriptor_t, cudnnCreateRNNDataDescriptor, cudnnDestroyRNNDataDescriptor)
DESCRIPTOR(cudnnStatus_t, cudnnRNNDescriptor_t, cudnnCreateRNNDescriptor, cudnnDestroyRNNDescriptor)

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t *made) {
  *made = calloc(1, sizeof **made);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t it) {
  free(it);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t it, cudnnDataType_t type, int count,
                                         const int sizes[], const int strides[]) {
  it->type = type;
  it->count = count;
  memcpy(it->sizes, sizes, count * sizeof *sizes);
  memcpy(it->strides, strides, count * sizeof *strides);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t it, int asked, cudnnDataType_t *type,
                                         int *count, int sizes[], int strides[]) {
  int known = it->count < asked ? it->count : asked;
  *type = it->type;
  *count = it->count;
  memcpy(sizes, it->sizes, known * sizeof *sizes);
  memcpy(strides, it->strides, known * sizeof *strides);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t it, cudnnDataType_t type, cudnnRNNDataLayout_t layout,
                                        int length, int batch, int width, const int lengths[], void *padding) {
  *it = (struct cudnnRNNDataStruct){length, batch};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t it, cudnnRNNAlgo_t algorithm, cudnnRNNMode_t cell,
                                       cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction,
                                       cudnnRNNInputMode_t input_mode, cudnnDataType_t type, cudnnDataType_t precision,
                                       cudnnMathType_t math, int32_t input, int32_t hidden, int32_t projected,
                                       int32_t layers, cudnnDropoutDescriptor_t dropout, uint32_t flags) {
  *it = (struct cudnnRNNStruct){
      .type = type,
      .gates = cell == CUDNN_LSTM ? 4 : cell == CUDNN_GRU ? 3 : 1,
      .has_bias = bias != CUDNN_RNN_NO_BIAS,
      .directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1,
      .input = input,
      .hidden = hidden,
      .projected = projected,
      .layers = layers,
  };
  return CUDNN_STATUS_SUCCESS;
}

static size_t bytes_per_value(cudnnDataType_t type) {
  return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_FLOAT ? 4 : 2;
}

static size_t input_of(cudnnRNNDescriptor_t it, int pseudo_layer) {
  return pseudo_layer < it->directions ? it->input : it->directions * it->projected;
}

static size_t matrices_of(cudnnRNNDescriptor_t it, int pseudo_layer) {  // in values
  size_t projection = it->projected == it->hidden ? 0 : it->projected * it->hidden;
  return it->gates * it->hidden * (input_of(it, pseudo_layer) + it->projected) + projection;
}

static size_t biases_of(cudnnRNNDescriptor_t it) { return it->has_bias ? 2 * it->gates * it->hidden : 0; }

cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t handle, cudnnRNNDescriptor_t it, size_t *bytes) {
  size_t values = 0;
  for (int i = 0; i < (int)it->layers * it->directions; i++) values += matrices_of(it, i) + biases_of(it);
  *bytes = values * bytes_per_value(it->type);
  return CUDNN_STATUS_SUCCESS;
}

static void describe(cudnnTensorDescriptor_t it, void **at, cudnnDataType_t type, char *start, int rows, int columns) {
  if (at) *at = start;  // the caller asks for the matrix or for the bias, and leaves the other out
  if (it && start) cudnnSetTensorNdDescriptor(it, type, 3, (int[]){1, rows, columns}, (int[]){rows * columns, columns, 1});
}

// The linear layers of a cell: `gates` on its input, `gates` on its state, then the projection.
cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t handle, cudnnRNNDescriptor_t it, int32_t pseudo_layer,
                                      size_t bytes, const void *weights, int32_t linear, cudnnTensorDescriptor_t matrix,
                                      void **matrix_at, cudnnTensorDescriptor_t bias, void **bias_at) {
  size_t width = bytes_per_value(it->type), input = input_of(it, pseudo_layer);
  int is_on_input = linear < it->gates, is_projection = linear == 2 * it->gates;
  char *layer = (char *)weights;
  for (int i = 0; i < pseudo_layer; i++) layer += width * (matrices_of(it, i) + biases_of(it));

  size_t rows = is_projection ? it->projected : it->hidden;
  size_t columns = is_on_input ? input : is_projection ? it->hidden : it->projected;
  size_t before = is_on_input ? linear * input : it->gates * input + (linear - it->gates) * it->projected;
  int has_matrix = !is_projection || it->projected != it->hidden;
  describe(matrix, matrix_at, it->type, has_matrix ? layer + width * it->hidden * before : 0, rows, columns);

  char *biases = layer + width * matrices_of(it, pseudo_layer);
  int has_bias = it->has_bias && !is_projection;
  describe(bias, bias_at, it->type, has_bias ? biases + width * linear * it->hidden : 0, it->hidden, 1);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t handle, cudnnRNNDescriptor_t it, cudnnForwardMode_t mode,
                                        cudnnRNNDataDescriptor_t x, size_t *workspace, size_t *reserve) {
  size_t position = it->directions * it->hidden * bytes_per_value(it->type);  // one state of one position
  size_t positions = x->length * x->batch;
  *workspace = positions * position * it->gates;
  if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? positions * position * it->layers * (it->gates + 2) : 0;
  return CUDNN_STATUS_SUCCESS;
}
