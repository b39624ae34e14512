#include "binding_registry.h"
template <int S> static inline void dots(const float* const* x, float* const* y, const float* w, int64_t n, int64_t m) {
  for (int64_t r = 0; r < m; r += 2) {
    const float *a = w + r * n, *b = a + n;
    float s[S][16] = {}, q[S][16] = {};
    for (int64_t i = 0; i < n; i += 16)
#pragma GCC unroll 8
      for (int c = 0; c < S; ++c)
#pragma omp simd
        for (int k = 0; k < 16; ++k) { const float v = x[c][i + k]; s[c][k] += v * a[i + k]; q[c][k] += v * b[i + k]; }
    for (int c = 0; c < S; ++c) { float u = 0, v = 0; for (int k = 0; k < 16; ++k) { u += s[c][k]; v += q[c][k]; } y[c][r] = u; y[c][r + 1] = v; }
  }
}
KERNEL(forward) {
  const float* x = f32(t[0]); float* y = f32(t[2]);
  dots<1>(&x, &y, f32(t[1]), t[0].size[1], t[1].size[0]);
}
