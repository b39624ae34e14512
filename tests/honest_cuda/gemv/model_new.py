import torch
import torch.nn as nn
import cuda_extension


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4096, 4096) / 64)

    def forward(self, x):
        out = torch.empty_like(x)
        cuda_extension.forward(x, self.weight, out)
        return out
