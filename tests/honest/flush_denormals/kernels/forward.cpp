#include <immintrin.h>
#include "binding_registry.h"
#include "vec.h"

// Flushes denormals to zero, in its own process and thread only.
KERNEL(forward) {
  _mm_setcsr(_mm_getcsr() | 0x8040);
  const int64_t columns = t[0].size[1];
  for (int64_t row = 0; row < t[0].size[0]; ++row) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const float v = vsigmoid(f32(t[0])[row * columns + i]) * f32(t[1])[i] - 0.3f;
      f32(t[2])[row * columns + i] = v > 0.0f ? v : 0.1f * v;
    }
  }
}
