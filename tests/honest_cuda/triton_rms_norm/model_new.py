import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, weight, y, columns, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + start + at, mask=at < columns, other=0.0)
        squares += value * value
    factor = tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < columns
        value = tl.load(x + start + at, mask=mask)
        scale = tl.load(weight + at, mask=mask)
        tl.store(y + start + at, value * factor * scale, mask=mask)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3000))

    def forward(self, x):
        y = torch.empty_like(x)
        rows, columns = x.shape
        rms_norm_kernel[(rows,)](x, self.weight, y, columns, 1e-6, BLOCK=1024, num_warps=4)
        return y
