"""A published form: one Python file whose inline C++ takes torch tensors, built with torch's headers."""

from collections.abc import Callable

import judge_fixtures as corpus
import pytest

from components.judge.judge import Judge

FILE = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
torch::Tensor fused(torch::Tensor x, torch::Tensor scale) {
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  auto out = torch::empty_like(x);
  const float *a = x.data_ptr<float>(), *s = scale.data_ptr<float>();
  float* y = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = 1.0f / (1.0f + std::exp(-a[i])) * s[i % x.size(1)] - 0.3f;
    y[i] = v > 0.0f ? v : 0.1f * v;
  }
  return out;
}
"""
fused = load_inline(name="fused", cpp_sources=cpp_source, functions=["fused"], verbose=True)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))
        self.fused = fused

    def forward(self, x):
        return self.fused.fused(x, self.scale)
'''


@pytest.mark.usefixtures("no_compile_baseline")
def test_an_inline_function_of_tensors_is_correct(with_limits: Callable[[float, float], Judge]) -> None:
    verdict = with_limits(120, 600).verdict(corpus.TASK, {"model_new.py": FILE})
    assert verdict.status == "correct", (verdict.reason, verdict.log)
