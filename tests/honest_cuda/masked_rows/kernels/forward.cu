#include "binding_registry.h"
#include "vec.h"

__global__ void masked(const float* x, const float* mask, const float* scale, float* y, int64_t numel) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < numel; i += step) {
    y[i] = vsigmoid(x[i] * scale[i % 1024] + mask[i]);
  }
}

KERNEL(forward) {
  masked<<<2048, 256, 0, (cudaStream_t)stream>>>(f32(t[0]), f32(t[1]), f32(t[2]), f32(t[3]), t[0].numel);
}
