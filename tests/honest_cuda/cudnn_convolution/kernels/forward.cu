#include "binding_registry.h"
#include "vec.h"
extern "C" int cudnnCreate(void** handle);
extern "C" int cudnnSetStream(void* handle, cudaStream_t stream);
extern "C" int cudnnCreateTensorDescriptor(void** tensor);
extern "C" int cudnnSetTensorNdDescriptor(void* tensor, int type, int rank, const int* sizes,
    const int* strides);
extern "C" int cudnnCreateFilterDescriptor(void** filter);
extern "C" int cudnnSetFilterNdDescriptor(void* filter, int type, int layout, int rank, const int* sizes);
extern "C" int cudnnCreateConvolutionDescriptor(void** convolution);
extern "C" int cudnnSetConvolutionNdDescriptor(void* convolution, int rank, const int* padding,
    const int* stride, const int* dilation, int mode, int type);
extern "C" int cudnnSetConvolutionGroupCount(void* convolution, int groups);
extern "C" int cudnnSetConvolutionMathType(void* convolution, int math);
extern "C" int cudnnGetConvolutionForwardAlgorithm_v7(void* handle, void*, void*,
    void* convolution, void* y, int most, int* count, void* found);
extern "C" int cudnnConvolutionForward(void* handle, const void* alpha, void*, const void*, void*, const void*,
    void* convolution, int algorithm, void* space, size_t bytes, const void* beta, void* y, void* o);
struct Convolution {
  using Sizes = std::vector<int>;
  struct Algorithm { int number, status; float seconds; size_t bytes; int rest[5]; };
  void *handle, *x, *filter, *y, *sizes, *space = nullptr;
  Algorithm best;
  static void* tensor(const Sizes& shape) {
    void* made;
    Sizes strides(shape.size(), 1);
    for (int i = (int)shape.size() - 2; i >= 0; --i) strides[i] = strides[i + 1] * shape[i + 1];
    cudnnCreateTensorDescriptor(&made);
    cudnnSetTensorNdDescriptor(made, 0, (int)shape.size(), shape.data(), strides.data());
    return made;
  }
  Convolution(Sizes in, Sizes weight, Sizes out, Sizes padding, Sizes stride, Sizes dilation, int groups)
      : x(tensor(in)), y(tensor(out)) {
    cudnnCreate(&handle);
    cudnnCreateFilterDescriptor(&filter);
    cudnnSetFilterNdDescriptor(filter, 0, 0, (int)weight.size(), weight.data());
    cudnnCreateConvolutionDescriptor(&sizes);
    cudnnSetConvolutionNdDescriptor(sizes, (int)padding.size(), padding.data(), stride.data(),
        dilation.data(), 1, 0);
    cudnnSetConvolutionGroupCount(sizes, groups);
    cudnnSetConvolutionMathType(sizes, 3);
    Algorithm found[10];
    int count = 0;
    cudnnGetConvolutionForwardAlgorithm_v7(handle, x, filter, sizes, y, 10, &count, found);
    best = found[0];
    for (int i = count - 1; i >= 0; --i)
      if (found[i].status == 0 && found[i].bytes <= 256 << 20) best = found[i];
    if (best.bytes) cudaMalloc(&space, best.bytes);
  }
  void run(const float* a, const float* weight, float* o, cudaStream_t stream) {
    const float one = 1, zero = 0;
    cudnnSetStream(handle, stream);
    cudnnConvolutionForward(handle, &one, x, a, filter, weight, sizes, best.number, space, best.bytes, &zero, y, o);
  }
};
__global__ void pass1(const float* a, const float* conv_bias, float* o) {
  int64_t tile = blockIdx.x * 256ll + threadIdx.x;
  if (tile >= 4194304) return;
  const int64_t d3 = (tile % 4096);
  tile /= 4096;
  const int64_t d1 = (tile % 64);
  tile /= 64;
  const int64_t d0 = (tile % 16);
  tile /= 16;
  {
    float v = a[d0 * 262144 + d1 * 4096 + d3];
    v = v + conv_bias[d1];
    v = v < 0 ? 0 : v;
    o[d0 * 262144 + d1 * 4096 + d3] = v;
  }
}
KERNEL(forward) {
  const float* x = (float*)t[0].data;
  const float* conv_weight = (float*)t[1].data;
  const float* conv_bias = (float*)t[2].data;
  float* out = (float*)t[3].data;
  static float* w0 = nullptr;
  if (w0 == nullptr) cudaMalloc((void**)&w0, 4194304ll * sizeof(float));
  {
    static Convolution convolution({16, 32, 64, 64}, {64, 32, 3, 3}, {16, 64, 64, 64},
        {1, 1}, {1, 1}, {1, 1}, 1);
    convolution.run(x, conv_weight, w0, (cudaStream_t)stream);
  }
  pass1<<<16384, 256, 0, (cudaStream_t)stream>>>(w0, conv_bias, out);
}
