import torch
import torch.nn as nn
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def softplus(value):
    return tl.maximum(value, 0.0) + libdevice.log1p(libdevice.exp(-tl.abs(value)))


@triton.jit
def mish_kernel(x, slope, y, n, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    value = tl.load(x + at, mask=mask, other=0.0)
    factor = tl.load(slope + at % columns, mask=mask, other=0.0)
    tl.store(y + at, value * libdevice.tanh(softplus(value * factor)), mask=mask)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(2100))

    def forward(self, x):
        y = torch.empty_like(x)
        n = x.numel()
        mish_kernel[(triton.cdiv(n, 1024),)](x, self.slope, y, n, x.shape[-1], BLOCK=1024, num_warps=4)
        return y
