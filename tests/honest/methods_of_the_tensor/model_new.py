import torch
import torch.nn as nn
import cuda_extension


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        rows, columns = x.size(0), x.shape[-1]
        out = x.new_empty(rows * columns)
        cuda_extension.forward(x.contiguous(), self.scale.detach(), out)
        return out.view(rows, columns)
