#include "binding_registry.h"
#include "vec.h"

// Right, and slower than eager: the same work several times.
KERNEL(forward) {
  for (int again = 0; again < 8; ++again) {
    for (int64_t i = 0; i < t[0].numel; ++i) {
      const float v = vsigmoid(f32(t[0])[i]) * f32(t[1])[i % t[0].size[1]] - 0.3f;
      f32(t[2])[i] = v > 0.0f ? v : 0.1f * v;
    }
    asm volatile("" ::: "memory");
  }
}
