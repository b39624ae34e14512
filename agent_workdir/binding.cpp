// The Python module cuda_extension. It is compiled once per machine and linked to every candidate's kernels.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "binding_registry.h"

namespace py = pybind11;

static TensorView view_of(py::handle tensor) {
  if (!py::cast<bool>(tensor.attr("is_contiguous")())) throw std::invalid_argument("a kernel takes contiguous tensors");
  TensorView view{};
  view.data = reinterpret_cast<void*>(py::cast<uintptr_t>(tensor.attr("data_ptr")()));
  view.numel = 1;
  for (py::handle size : tensor.attr("shape")) {
    if (view.dim == 8) throw std::invalid_argument("a kernel takes tensors of at most 8 dimensions");
    view.size[view.dim] = py::cast<int64_t>(size);
    view.numel *= view.size[view.dim++];
  }
  return view;
}

static void* current_stream(py::handle tensor) {
  if (!py::cast<bool>(tensor.attr("is_cuda"))) return nullptr;
  py::object stream = py::module_::import("torch").attr("cuda").attr("current_stream")(tensor.attr("device"));
  return reinterpret_cast<void*>(py::cast<uintptr_t>(stream.attr("cuda_stream")));
}

PYBIND11_MODULE(cuda_extension, module) {
  for (const KernelEntry& entry : kernel_entries()) {
    module.def(entry.name, [function = entry.function](py::args tensors) {
      std::vector<TensorView> views;
      views.reserve(tensors.size());
      for (py::handle tensor : tensors) views.push_back(view_of(tensor));
      void* stream = views.empty() ? nullptr : current_stream(tensors[0]);
      function(views.data(), static_cast<int64_t>(views.size()), stream);
    });
  }
  for (BindingFunction function : binding_functions()) function(module);
}
