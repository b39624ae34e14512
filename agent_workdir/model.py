import torch
import torch.nn as nn


class Model(nn.Module):
    """Example task of the template, alpha * sigmoid(a) + b; replace it by the module to make faster."""

    def __init__(self, alpha):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), alpha))

    def forward(self, a, b):
        return self.alpha * torch.sigmoid(a) + b


def get_inputs():
    return [torch.randn(512, 1024), torch.randn(512, 1024)]


def get_init_inputs():
    return [2.0]
