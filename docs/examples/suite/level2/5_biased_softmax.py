import torch
import torch.nn as nn

NUMEL = 262144


class Model(nn.Module):
    """Scaled scores with a bias for each column, as a softmax over rows."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(512))

    def forward(self, x):
        return torch.softmax(0.125 * x + self.bias, dim=1)


def get_inputs():
    return [torch.randn(NUMEL // 512, 512)]


def get_init_inputs():
    return []
