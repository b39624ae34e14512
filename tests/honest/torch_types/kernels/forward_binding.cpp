#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
#include "../binding_registry.h"
#include "vec.h"

static torch::Tensor forward(torch::Tensor x, torch::Tensor scale) {
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  TORCH_CHECK(x.dtype() == torch::kFloat32, "x must be float32");
  auto out = torch::empty_like(x);
  const float *a = x.data_ptr<float>(), *s = scale.data_ptr<float>();
  float* y = out.data_ptr<float>();
  const int64_t columns = x.size(1);
  for (int64_t r = 0; r < x.size(0); ++r)
    for (int64_t i = 0; i < columns; ++i) {
      const float v = vsigmoid(a[r * columns + i]) * s[i] - 0.3f;
      y[r * columns + i] = v > 0.0f ? v : 0.1f * v;
    }
  return out;
}

static void register_forward(pybind11::module& m) { m.def("forward", &forward, py::arg("x"), py::arg("scale")); }
REGISTER_BINDING(forward, register_forward);
