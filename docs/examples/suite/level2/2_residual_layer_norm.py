import torch
import torch.nn as nn
import torch.nn.functional as F

NUMEL = 262144


class Model(nn.Module):
    """A residual sum, layer normalisation, and a leaky rectifier."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(512)

    def forward(self, x, residual):
        return F.leaky_relu(self.norm(x + residual), 0.1)


def get_inputs():
    return [torch.randn(NUMEL // 512, 512), torch.randn(NUMEL // 512, 512)]


def get_init_inputs():
    return []
