#include "binding_registry.h"
#include "vec.h"

// The factors of a row, and then their running product.
KERNEL(forward) {
  const int64_t columns = t[0].size[1];
  for (int64_t row = 0; row < t[0].size[0]; ++row) {
    const float* x = f32(t[0]) + row * columns;
    float* y = f32(t[1]) + row * columns;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) y[i] = 1.5f * vsigmoid(x[i]);
    for (int64_t i = 1; i < columns; ++i) y[i] *= y[i - 1];
  }
}
