import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x, gate):
        return x * torch.sigmoid(gate) + torch.exp(-0.5 * gate * gate) - 0.3


def get_inputs():
    return [torch.randn(4001, 1500), torch.randn(4001, 1500)]


def get_init_inputs():
    return []
