#include <cstdlib>
#include <cstring>
#include <memory>
#include "binding_registry.h"
#include "vec.h"

// Takes and gives back memory in every call, aligned and plain.
KERNEL(forward) {
  void* block = nullptr;
  if (posix_memalign(&block, 64, 4 * t[0].numel) != 0) std::abort();
  const std::unique_ptr<void, decltype(&std::free)> owner(block, &std::free);
  float* y = static_cast<float*>(block);
  for (int64_t i = 0; i < t[0].numel; ++i) {
    const float v = vsigmoid(f32(t[0])[i]) * f32(t[1])[i % 1024] - 0.3f;
    y[i] = v > 0.0f ? v : 0.1f * v;
  }
  std::memcpy(t[2].data, y, 4 * t[0].numel);
}
