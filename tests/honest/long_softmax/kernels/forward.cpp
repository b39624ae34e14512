#include <cmath>
#include "binding_registry.h"
#include "vec.h"

// The sums are in double, so the answer is more exact than eager's.
KERNEL(forward) {
  const int64_t columns = t[0].size[1];
  for (int64_t row = 0; row < t[0].size[0]; ++row) {
    const float* x = f32(t[0]) + row * columns;
    float* y = f32(t[1]) + row * columns;
    float top = x[0];
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < columns; ++i) top = x[i] > top ? x[i] : top;
    double sum = 0;
    for (int64_t i = 0; i < columns; i += 256) {
      const int64_t end = i + 256 < columns ? i + 256 : columns;
      float part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t j = i; j < end; ++j) {
        y[j] = vexp(x[j] - top);
        part += y[j];
      }
      sum += part;
    }
    const float factor = static_cast<float>(1 / sum);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) y[i] *= factor;
  }
}
