#include <cmath>
#include "binding_registry.h"

// Computes in double and rounds once, which is the exact answer.
KERNEL(forward) {
  const int64_t columns = t[0].size[1];
  for (int64_t row = 0; row < t[0].size[0]; ++row) {
    const float* x = f32(t[0]) + row * columns;
    float* y = f32(t[1]) + row * columns;
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += x[i];
    for (int64_t i = 0; i < columns; ++i) y[i] = static_cast<float>(std::tanh(sum * x[i]));
  }
}
