import torch
import torch.nn as nn
import cuda_extension


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1024, 1024))

    def forward(self, x):
        out = torch.empty_like(x)
        cuda_extension.forward(x, self.weight, out)
        return out
