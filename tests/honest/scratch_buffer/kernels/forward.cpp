#include <vector>
#include "binding_registry.h"
#include "vec.h"

KERNEL(forward) {
  static std::vector<float> row_of_sigmoids;  // scratch that outlives the call, as an honest kernel may have
  const int64_t columns = t[0].size[1];
  row_of_sigmoids.resize(columns);
  for (int64_t row = 0; row < t[0].size[0]; ++row) {
    const float* x = f32(t[0]) + row * columns;
    float* y = f32(t[2]) + row * columns;
    for (int64_t i = 0; i < columns; ++i) row_of_sigmoids[i] = vsigmoid(x[i]);
    for (int64_t i = 0; i < columns; ++i) {
      const float v = row_of_sigmoids[i] * f32(t[1])[i] - 0.3f;
      y[i] = v > 0.0f ? v : 0.1f * v;
    }
  }
}
