#include "binding_registry.h"
#include "vec.h"
#include "cuda_libraries.h"
constexpr int64_t X0 = 32, X1 = 256, X2 = 512, Y1 = 320, Y2 = 384;
__global__ void pass1(const float* a, const float* p_linear_bias, float* o) {
  int64_t tile = blockIdx.x * 256ll + threadIdx.x;
  if (tile >= X0 * X1 * 384) return;
  const int64_t d2 = tile % 384;
  tile /= 384;
  const int64_t d1 = tile;
  {
    float v = a[d1 * 384 + d2];
    v = v + p_linear_bias[d2];
    o[d1 * 384 + d2] = v;
  }
}
__global__ void pass3(const float* a, float* o) {
  int64_t tile = blockIdx.x * 256ll + threadIdx.x;
  if (tile >= X0 * X1 * Y1) return;
  const int64_t d2 = tile;
  {
    float v = a[d2];
    v = v < 0 ? 0 : v;
    o[d2] = v;
  }
}
KERNEL(forward) {
  const float* x = (float*)t[0].data;
  const float* y = (float*)t[1].data;
  const float* p_linear_weight = (float*)t[2].data;
  const float* p_linear_bias = (float*)t[3].data;
  float* out = (float*)t[4].data;
  static float* w0 = device_buffer(X0 * X1 * 384);
  matrix_product(X1, 384, X2, {x, X2, 1, X1 * X2}, {p_linear_weight, 1, 512, 0}, w0, X0, stream);
  static float* w1 = device_buffer(X0 * X1 * 384);
  pass1<<<(X0 * X1 * 384 + 255) / 256, 256, 0, (cudaStream_t)stream>>>(w0, p_linear_bias, w1);
  static float* w2 = device_buffer(X0 * X1 * Y1);
  matrix_product(X1, Y1, 384, {w1, 384, 1, X1 * 384}, {y, 1, Y2, Y1 * Y2}, w2, X0, stream);
  pass3<<<(X0 * X1 * Y1 + 255) / 256, 256, 0, (cudaStream_t)stream>>>(w2, out);
}
