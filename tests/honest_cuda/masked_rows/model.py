import torch
import torch.nn as nn


class Model(nn.Module):
    """Scores with an additive mask, whose inputs are drawn anew for each call because of its infinities."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x, mask):
        return torch.sigmoid(x * self.scale + mask)


def get_inputs():
    x = torch.randn(4096, 1024)
    return [x, torch.zeros(4096, 1024).masked_fill(torch.rand(4096, 1024) < 0.3, float("-inf"))]


def get_init_inputs():
    return []
