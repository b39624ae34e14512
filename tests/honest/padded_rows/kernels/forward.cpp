#include <cstring>
#include "binding_registry.h"
KERNEL(forward) {
  for (int64_t r = 0; r < 64; ++r) {
    float* y = f32(t[1]) + r * 16000;
    for (int i = 0; i < 128; ++i) y[i] = 2 * f32(t[0])[r * 128 + i];
    std::memset(y + 128, 0, 4 * 15872);
  }
}
