import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def logsumexp_kernel(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = float("-inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + at, mask=at < columns, other=float("-inf"))
        new = tl.maximum(largest, tl.max(value, axis=0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(value - new), axis=0)
        largest = new
    tl.store(y + row, largest + tl.log(total))


class ModelNew(nn.Module):
    def forward(self, x):
        rows, columns = x.shape
        y = torch.empty(rows, dtype=x.dtype, device=x.device)
        logsumexp_kernel[(rows,)](x, y, columns, BLOCK=2048, num_warps=8)
        return y
