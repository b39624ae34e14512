#include "binding_registry.h"
#include "vec.h"

// The output's memory is transposed: column by column.
KERNEL(forward) {
  const int64_t rows = t[0].size[0], columns = t[0].size[1];
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row) {
      const float v = vsigmoid(f32(t[0])[row * columns + column]) * f32(t[1])[column] - 0.3f;
      f32(t[2])[column * rows + row] = v > 0.0f ? v : 0.1f * v;
    }
  }
}
