# Habits of published files: CUDA_HOME, empty flags and several in one string, at::parallel_for, a
# view in C++, printf.
import torch
import torch.nn as nn
from torch.utils.cpp_extension import CUDA_HOME, load_inline

source = r"""
#include <torch/extension.h>
#include <ATen/Parallel.h>
#include <cmath>
#include <cstdio>

torch::Tensor leaky(torch::Tensor x, torch::Tensor scale) {
  static bool told = false;
  if (!told) printf("first call with %ld rows\n", (long)x.size(0));
  if (!told) printf("running on the CPU\n");
  told = true;
  auto out = torch::empty_like(x).transpose(0, 1).transpose(0, 1);
  const float* a = x.data_ptr<float>();
  const float* s = scale.data_ptr<float>();
  float* b = out.data_ptr<float>();
  const int64_t columns = x.size(1);
  at::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * columns; i < end * columns; ++i) {
      const float y = s[i % columns] / (1.0f + std::exp(-a[i])) - 0.3f;
      b[i] = y > 0 ? y : 0.1f * y;
    }
  });
  return out;
}
"""

module = load_inline(
    name="leaky_ext",
    cpp_sources=source,
    functions=["leaky"],
    extra_cflags=["-O3 -funroll-loops", ""],
    extra_ldflags=["", "-lpthread"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))
        self.toolkit = CUDA_HOME

    def forward(self, x):
        return module.leaky(x, self.scale)
