import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """Rows, each padded to a tensor of its own."""

    def forward(self, x):
        return [F.pad(row, (0, 15872)) for row in (2 * x).unbind()]


def get_inputs():
    return [torch.randn(64, 128)]


def get_init_inputs():
    return []
