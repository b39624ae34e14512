"""Layer norm, then gelu: eager runs both in vectorised loops."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.act = nn.GELU()

    def forward(self, hidden):
        h = self.norm(hidden)
        return self.act(h)


def get_inputs():
    return [torch.randn(256, 1024)]


def get_init_inputs():
    return []
