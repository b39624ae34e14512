import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.heuristics({"BLOCK": lambda arguments: triton.next_power_of_2(arguments["columns"])})
@triton.jit
def layer_norm_kernel(x, weight, bias, y, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    value = tl.load(x + row * columns + at, mask=mask, other=0.0)
    mean = tl.sum(value, axis=0) / columns
    centred = tl.where(mask, value - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / columns
    scale = tl.load(weight + at, mask=mask)
    shift = tl.load(bias + at, mask=mask)
    tl.store(y + row * columns + at, centred * tl.rsqrt(variance + eps) * scale + shift, mask=mask)


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        y = torch.empty_like(x)
        rows, columns = x.shape
        layer_norm_kernel[(rows,)](x, self.weight, self.bias, y, columns, 1e-5, num_warps=8)
        return y
