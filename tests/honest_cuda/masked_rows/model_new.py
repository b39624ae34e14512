import torch
import torch.nn as nn
import cuda_extension


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x, mask):
        out = torch.empty_like(x)
        cuda_extension.forward(x, mask, self.scale, out)
        return out
