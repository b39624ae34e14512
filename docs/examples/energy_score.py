"""Energy score of logits at temperature 2, which detects inputs of unknown classes: one value per row."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.logsumexp(x * 0.5, dim=-1, keepdim=True)


def get_inputs():
    return [torch.randn(256, 1024)]


def get_init_inputs():
    return []
