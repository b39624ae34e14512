"""A normalised layer and its activation."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Layer norm, then mish."""

    def __init__(self):
        super().__init__()
        self.layer_norm = nn.LayerNorm(1024)

    def forward(self, x):
        return F.mish(self.layer_norm(x))


def get_inputs():
    return [torch.randn(256, 1024)]


def get_init_inputs():
    return []
