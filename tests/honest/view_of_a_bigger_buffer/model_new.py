import torch
import torch.nn as nn
import cuda_extension


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        out = torch.empty(x.size(0) + 8, x.size(1))[4:-4]
        cuda_extension.forward(x, self.scale, out)
        return out
