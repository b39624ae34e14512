import torch
import torch.nn as nn
import cuda_extension

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2048, 2048) / 45)

    def forward(self, x):
        out = x.new_empty((1, 2048))
        cuda_extension.forward(x, self.weight, out)
        return out
