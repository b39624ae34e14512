"""A normalised layer and its activation; use it with --class Block --inputs "torch.randn(256, 1024)"."""

import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    """Layer norm, then mish."""

    def __init__(self):
        super().__init__()
        self.layer_norm = nn.LayerNorm(1024)

    def forward(self, x):
        return F.mish(self.layer_norm(x))
