#include "binding_registry.h"
#include "vec.h"

KERNEL(forward) {
  const float *x = f32(t[0]), *table = f32(t[1]), *scale = f32(t[2]), step = f32(t[3])[0];
  float* y = f32(t[4]);
  const int64_t columns = t[0].size[1];
  for (int64_t row = 0; row < t[0].size[0]; ++row) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t at = row * columns + i;
      y[at] = (x[at] + table[at]) * scale[i] + step;
    }
  }
}
