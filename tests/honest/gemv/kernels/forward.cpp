#include "binding_registry.h"

// Two rows of the weights at a time, sixteen sums of each.
KERNEL(forward) {
  const int64_t n = t[0].size[1];
  const float* x = f32(t[0]);
  for (int64_t row = 0; row < t[1].size[0]; row += 2) {
    const float *a = f32(t[1]) + row * n, *b = a + n;
    float first[16] = {}, second[16] = {};
    for (int64_t i = 0; i < n; i += 16)
#pragma omp simd
      for (int k = 0; k < 16; ++k) {
        first[k] += x[i + k] * a[i + k];
        second[k] += x[i + k] * b[i + k];
      }
    float u = 0, v = 0;
    for (int k = 0; k < 16; ++k) {
      u += first[k];
      v += second[k];
    }
    f32(t[2])[row] = u;
    f32(t[2])[row + 1] = v;
  }
}
