#include <pybind11/pybind11.h>
#include "binding_registry.h"
#include "vec.h"

namespace py = pybind11;

static float* pointer(const py::object& tensor) { return reinterpret_cast<float*>(py::cast<uintptr_t>(tensor.attr("data_ptr")())); }

static void forward(const py::object& x, const py::object& scale, const py::object& out) {
  const float *in = pointer(x), *by = pointer(scale);
  float* y = pointer(out);
  const int64_t numel = py::cast<int64_t>(x.attr("numel")());
  for (int64_t i = 0; i < numel; ++i) {
    const float v = vsigmoid(in[i]) * by[i % 1024] - 0.3f;
    y[i] = v > 0.0f ? v : 0.1f * v;
  }
}

static void add(py::module_& module) { module.def("forward", &forward); }
REGISTER_BINDING(forward, add);
