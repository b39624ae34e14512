import os

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block in (512, 2048) for warps in (4, 8)],
    key=["n"],
)
@triton.jit
def gated_kernel(x, gate, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    value = tl.load(x + at, mask=mask)
    opening = tl.load(gate + at, mask=mask)
    tl.store(y + at, value * tl.sigmoid(opening) + tl.exp(-0.5 * opening * opening) - 0.3, mask=mask)


def gated(x, gate):
    y = torch.empty_like(x)
    n = x.numel()
    gated_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, gate, y, n)
    return y


class ModelNew(nn.Module):
    def forward(self, x, gate):
        return gated(x.contiguous(), gate.contiguous())


def get_inputs():
    return [torch.rand(4001, 1500, device="cuda"), torch.rand(4001, 1500, device="cuda")]


def get_init_inputs():
    return []


if __name__ == "__main__":
    print(ModelNew()(*get_inputs()).mean())
