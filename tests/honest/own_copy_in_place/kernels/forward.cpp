#include <cstring>
#include "binding_registry.h"
#include "vec.h"

// Copies the input to its output and works there in place.
KERNEL(forward) {
  std::memcpy(t[2].data, t[0].data, 4 * t[0].numel);
  float* y = f32(t[2]);
  for (int64_t i = 0; i < t[0].numel; ++i) {
    const float v = vsigmoid(y[i]) * f32(t[1])[i % 1024] - 0.3f;
    y[i] = v > 0.0f ? v : 0.1f * v;
  }
}
