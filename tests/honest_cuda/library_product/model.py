import torch
import torch.nn as nn


class Model(nn.Module):
    """A linear layer, then products with a matrix for each sample."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 384)

    def forward(self, x, y):
        return torch.relu(torch.matmul(self.linear(x), y.transpose(-2, -1)))


def get_inputs():
    return [torch.randn(32, 256, 512), torch.randn(32, 320, 384)]


def get_init_inputs():
    return []
