import torch
import torch.nn as nn

import cuda_extension


class ModelNew(nn.Module):
    def __init__(self, alpha):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), alpha))

    def forward(self, a, b):
        out = torch.empty_like(a)
        cuda_extension.forward(a, b, self.alpha, out)
        return out
