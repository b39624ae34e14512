import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.cumprod(torch.sigmoid(x) + 0.5, dim=-1)


def get_inputs():
    return [torch.randn(4, 16384)]


def get_init_inputs():
    return []
