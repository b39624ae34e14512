#include <algorithm>
#include "binding_registry.h"
#include "vec.h"

template <int N>
static void block(const float* x, const float* scale, float* y) {
  float squashed[N];
#pragma omp simd
  for (int i = 0; i < N; ++i) squashed[i] = vsigmoid(x[i]) * scale[i] - 0.3f;
  std::transform(squashed, squashed + N, y, [](float v) { return v > 0.0f ? v : 0.1f * v; });
}

// Tiles of 128 by a template, results through the stack.
KERNEL(forward) {
  for (int64_t i = 0; i < t[0].numel; i += 128) block<128>(f32(t[0]) + i, f32(t[1]) + i % 1024, f32(t[2]) + i);
}
