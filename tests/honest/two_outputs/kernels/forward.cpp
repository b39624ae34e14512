#include "binding_registry.h"
#include "vec.h"

// Another order of summation than torch's.
KERNEL(forward) {
  const int64_t columns = t[0].size[1];
  for (int64_t row = 0; row < t[0].size[0]; ++row) {
    const float* x = f32(t[0]) + row * columns;
    float* y = f32(t[2]) + row * columns;
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < columns; ++i) {
      y[i] = vsigmoid(x[i]) * f32(t[1])[i];
      total += y[i];
    }
    f32(t[3])[row] = total;
  }
}
