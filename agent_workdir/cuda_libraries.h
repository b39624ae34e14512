// For CUDA kernels: memory that is kept between calls, products of matrices by cuBLAS, and convolutions by cuDNN. The functions of
// the libraries are declared here; do not include <cublas_v2.h> or <cudnn.h> too. The first call allocates, so it cannot be captured
// in a CUDA graph, and calls on several streams share the memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" int cublasCreate_v2(void** handle);
extern "C" int cublasSetStream_v2(void* handle, cudaStream_t stream);
extern "C" int cublasSgemmStridedBatched(void* handle, int, int, int m, int n, int k, const float* alpha, const float* a, int lda,
    long long stride_a, const float* b, int ldb, long long stride_b, const float* beta, float* c, int ldc, long long stride_c,
    int count);
extern "C" int cudnnCreate(void** handle);
extern "C" int cudnnSetStream(void* handle, cudaStream_t stream);
extern "C" int cudnnCreateTensorDescriptor(void** tensor);
extern "C" int cudnnSetTensorNdDescriptor(void* tensor, int type, int rank, const int* sizes, const int* strides);
extern "C" int cudnnCreateFilterDescriptor(void** filter);
extern "C" int cudnnSetFilterNdDescriptor(void* filter, int type, int layout, int rank, const int* sizes);
extern "C" int cudnnCreateConvolutionDescriptor(void** convolution);
extern "C" int cudnnSetConvolutionNdDescriptor(void* convolution, int rank, const int* padding, const int* stride,
    const int* dilation, int mode, int type);
extern "C" int cudnnSetConvolutionGroupCount(void* convolution, int groups);
extern "C" int cudnnSetConvolutionMathType(void* convolution, int math);
extern "C" int cudnnGetConvolutionForwardAlgorithm_v7(void* handle, void* x, void* filter, void* convolution, void* y, int most,
    int* count, void* found);
extern "C" int cudnnGetConvolutionBackwardDataAlgorithm_v7(void* handle, void* filter, void* x, void* convolution, void* y, int most,
    int* count, void* found);
extern "C" int cudnnConvolutionForward(void* handle, const void* alpha, void* x, const void* a, void* filter, const void* weight,
    void* convolution, int algorithm, void* space, size_t bytes, const void* beta, void* y, void* o);
extern "C" int cudnnConvolutionBackwardData(void* handle, const void* alpha, void* filter, const void* weight, void* x, const void* a,
    void* convolution, int algorithm, void* space, size_t bytes, const void* beta, void* y, void* o);

// Return new memory for `numel` floats; `static float* w = device_buffer(numel);` in a kernel allocates it in the first call.
static inline float* device_buffer(int64_t numel) {
  void* data = nullptr;
  cudaMalloc(&data, numel * sizeof(float));
  return (float*)data;
}

// Matrices in memory: the first element, and the elements between neighbouring rows, columns and matrices. Of the distances of rows
// and columns one is 1. The last is 0 if there is one matrix, or the same one for all products.
struct Matrices {
  const float* data;
  int64_t row, column, next = 0;
};

// Compute `count` products of matrices, `out` = `a` times `b` with `m` rows and `n` columns, of sums over `k` terms in float32.
static inline void matrix_product(int64_t m, int64_t n, int64_t k, Matrices a, Matrices b, float* out, int64_t count, void* stream) {
  static void* handle = nullptr;
  if (handle == nullptr) cublasCreate_v2(&handle);
  cublasSetStream_v2(handle, (cudaStream_t)stream);
  const float one = 1, zero = 0;
  // cuBLAS has columns first, so it computes the transposed product with the factors swapped.
  const bool b_rows = b.column == 1, a_columns = a.row == 1;
  const int64_t lead_b = b_rows ? std::max(b.row, n) : std::max(b.column, k);
  const int64_t lead_a = a_columns ? std::max(a.column, m) : std::max(a.row, k);
  cublasSgemmStridedBatched(handle, !b_rows, a_columns, (int)n, (int)m, (int)k, &one, b.data, (int)lead_b, b.next, a.data, (int)lead_a,
      a.next, &zero, out, (int)n, m * n, (int)count);
}

// A convolution in float32, or a transposed one, which is the gradient of a convolution for its input. Made once: `static Convolution
// c({n, ins, h, w}, {outs, ins, kh, kw}, {n, outs, oh, ow}, padding, stride, dilation, groups);` and run in each call. The first
// algorithm of cuDNN that needs at most 256 MB is taken.
template <bool TRANSPOSED>
struct CudnnConvolution {
  using Sizes = std::vector<int>;
  struct Algorithm { int number, status; float seconds; size_t bytes; int rest[5]; };
  void *handle, *x, *filter, *y, *convolution, *space = nullptr;
  Algorithm best;

  static void* tensor(const Sizes& shape) {
    void* made;
    Sizes strides(shape.size(), 1);
    for (int i = (int)shape.size() - 2; i >= 0; --i) strides[i] = strides[i + 1] * shape[i + 1];
    cudnnCreateTensorDescriptor(&made);
    cudnnSetTensorNdDescriptor(made, 0, (int)shape.size(), shape.data(), strides.data());  // 0: float
    return made;
  }

  CudnnConvolution(Sizes in, Sizes weight, Sizes out, Sizes padding, Sizes stride, Sizes dilation, int groups) {
    if (in.size() == 3) {  // cuDNN has no convolution over one dimension
      for (Sizes* sizes : {&in, &weight, &out, &stride, &dilation}) sizes->push_back(1);
      padding.push_back(0);
    }
    x = tensor(in), y = tensor(out);
    cudnnCreate(&handle);
    cudnnCreateFilterDescriptor(&filter);
    cudnnSetFilterNdDescriptor(filter, 0, 0, (int)weight.size(), weight.data());  // 0: float, and NCHW
    cudnnCreateConvolutionDescriptor(&convolution);
    // 1: the correlation that torch calls a convolution; 3: products in float32.
    cudnnSetConvolutionNdDescriptor(convolution, (int)padding.size(), padding.data(), stride.data(), dilation.data(), 1, 0);
    cudnnSetConvolutionGroupCount(convolution, groups);
    cudnnSetConvolutionMathType(convolution, 3);
    Algorithm found[10];
    int count = 0;
    if constexpr (TRANSPOSED) {
      cudnnGetConvolutionBackwardDataAlgorithm_v7(handle, filter, x, convolution, y, 10, &count, found);
    } else {
      cudnnGetConvolutionForwardAlgorithm_v7(handle, x, filter, convolution, y, 10, &count, found);
    }
    best = found[0];
    for (int i = count - 1; i >= 0; --i)
      if (found[i].status == 0 && found[i].bytes <= 256 << 20) best = found[i];
    if (best.bytes) cudaMalloc(&space, best.bytes);
  }

  void run(const float* a, const float* weight, float* o, void* stream) {
    const float one = 1, zero = 0;
    cudnnSetStream(handle, (cudaStream_t)stream);
    if constexpr (TRANSPOSED) {
      cudnnConvolutionBackwardData(
          handle, &one, filter, weight, x, a, convolution, best.number, space, best.bytes, &zero, y, o);
    } else {
      cudnnConvolutionForward(
          handle, &one, x, a, filter, weight, convolution, best.number, space, best.bytes, &zero, y, o);
    }
  }
};
using Convolution = CudnnConvolution<false>;
using TransposedConvolution = CudnnConvolution<true>;
