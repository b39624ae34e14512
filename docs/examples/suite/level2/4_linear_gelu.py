import torch
import torch.nn as nn
import torch.nn.functional as F

NUMEL = 262144


class Model(nn.Module):
    """A linear layer followed by GELU."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x):
        return F.gelu(self.linear(x))


def get_inputs():
    return [torch.randn(NUMEL // 256, 256)]


def get_init_inputs():
    return []
