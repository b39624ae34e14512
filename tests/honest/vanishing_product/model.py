import torch
import torch.nn as nn


class Model(nn.Module):
    """The running product of each row's factors, which falls by about thirty decades."""

    def forward(self, x):
        return torch.cumprod(1.5 * torch.sigmoid(x), dim=-1)


def get_inputs():
    return [torch.randn(1024, 176)]


def get_init_inputs():
    return []
