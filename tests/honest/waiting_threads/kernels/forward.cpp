// Two threads with what libstdc++ makes of a futex: a promise, and a static variable that both initialise.
#include <future>
#include <thread>
#include <vector>

#include "binding_registry.h"
#include "vec.h"

static float offset() {
  static const std::vector<float> table(1 << 16, 0.3f);
  return table[1];
}

static void rows(const TensorView* t, int64_t from, int64_t to) {
  const int64_t columns = t[0].size[1];
  const float shift = offset();
  for (int64_t row = from; row < to; ++row) {
    const float* x = f32(t[0]) + row * columns;
    float* y = f32(t[2]) + row * columns;
    for (int64_t i = 0; i < columns; ++i) {
      const float v = vsigmoid(x[i]) * f32(t[1])[i] - shift;
      y[i] = v > 0.0f ? v : 0.1f * v;
    }
  }
}

KERNEL(forward) {
  const int64_t half = t[0].size[0] / 2;
  std::promise<void> done;
  std::thread helper([&] {
    rows(t, 0, half);
    done.set_value();
  });
  rows(t, half, t[0].size[0]);
  done.get_future().wait();
  helper.join();
}
