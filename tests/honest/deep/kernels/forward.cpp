#include <cmath>
#include "binding_registry.h"

KERNEL(forward) {
  for (int64_t i = 0; i < t[0].numel; ++i) {
    float v = f32(t[0])[i];
    for (int k = 0; k < 6; ++k) v = 1.0f / (1.0f + std::exp(-std::sin(v) * f32(t[1])[i % 1024]));
    f32(t[2])[i] = v;
  }
}
