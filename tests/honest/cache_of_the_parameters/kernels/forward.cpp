#include <cstring>
#include <vector>
#include "binding_registry.h"
#include "vec.h"

// Keeps a copy of the parameters in a form of its own, and renews it whenever they differ.
KERNEL(forward) {
  static std::vector<float> doubled(2048), known(1024);
  if (std::memcmp(known.data(), t[1].data, 4096) != 0) {
    std::memcpy(known.data(), t[1].data, 4096);
    for (int i = 0; i < 2048; ++i) doubled[i] = known[i % 1024];
  }
  for (int64_t row = 0; row < t[0].size[0]; row += 2) {
#pragma omp simd
    for (int64_t i = 0; i < 2048; ++i) {
      const float v = vsigmoid(f32(t[0])[row * 1024 + i]) * doubled[i] - 0.3f;
      f32(t[2])[row * 1024 + i] = v > 0.0f ? v : 0.1f * v;
    }
  }
}
