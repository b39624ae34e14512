#include "binding_registry.h"
#include "vec.h"

// Another order of summation than torch's: 16 partial sums, which are as exact on every processor. With one sum
// the number of partial sums would be the compiler's choice for the processor, and one is too inexact.
KERNEL(forward) {
  const int64_t columns = t[0].size[1];
  for (int64_t row = 0; row < t[0].size[0]; ++row) {
    const float* x = f32(t[0]) + row * columns;
    float* y = f32(t[2]) + row * columns;
    float partial[16] = {};
    for (int64_t first = 0; first < columns; first += 16) {
#pragma omp simd
      for (int64_t i = 0; i < 16; ++i) {
        y[first + i] = vsigmoid(x[first + i]) * f32(t[1])[first + i];
        partial[i] += y[first + i];
      }
    }
    float total = 0.0f;
    for (float sum : partial) total += sum;
    f32(t[3])[row] = total;
  }
}
