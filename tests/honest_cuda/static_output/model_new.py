import torch
import torch.nn as nn
import cuda_extension


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))
        self.out = None

    def forward(self, x):
        if self.out is None:
            self.out = torch.empty_like(x)
        cuda_extension.forward(x, self.scale, self.out)
        return self.out
