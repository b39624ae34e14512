// What a kernel file needs to be callable from model_new.py as cuda_extension.NAME(tensor, …). Read-only to candidates.
//
// Light form, no headers of torch or pybind11, so that a kernel builds in a fraction of a second:
//   KERNEL(forward) { const float* x = f32(t[0]); float* y = f32(t[1]); … }
// with t[0..count-1] the tensors in the order of the call and, on cuda, `stream` the current stream.
// Long form, for files that include pybind11 themselves: REGISTER_BINDING(name, register_function).
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

struct TensorView {
  void* data;
  int64_t numel;
  int64_t dim;
  int64_t size[8];
};

using KernelFunction = void (*)(const TensorView* t, int64_t count, void* stream);

struct KernelEntry {
  const char* name;
  KernelFunction function;
};

inline std::vector<KernelEntry>& kernel_entries() {
  static std::vector<KernelEntry> entries;
  return entries;
}

struct KernelRegistrar {
  KernelRegistrar(const char* name, KernelFunction function) { kernel_entries().push_back({name, function}); }
};

static inline float* f32(const TensorView& view) { return static_cast<float*>(view.data); }

#define KERNEL(name)                                                                      \
  static void name##_kernel(const TensorView* t, int64_t count, void* stream);            \
  static KernelRegistrar name##_kernel_registrar(#name, name##_kernel);                   \
  static void name##_kernel([[maybe_unused]] const TensorView* t, [[maybe_unused]] int64_t count, \
                            [[maybe_unused]] void* stream)

namespace pybind11 { class module_; }

using BindingFunction = void (*)(pybind11::module_&);

inline std::vector<BindingFunction>& binding_functions() {
  static std::vector<BindingFunction> functions;
  return functions;
}

struct BindingRegistrar {
  explicit BindingRegistrar(BindingFunction function) { binding_functions().push_back(function); }
};

#define REGISTER_BINDING(name, function) static BindingRegistrar name##_binding_registrar(function)
