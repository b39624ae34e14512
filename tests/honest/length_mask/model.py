import torch
import torch.nn as nn


class Model(nn.Module):
    """A mask of the valid places of padded sequences, as encoders take."""

    def forward(self, lengths):
        return torch.arange(16384)[None, :] < lengths[:, None]


def get_inputs():
    return [torch.randint(4096, 12288, (512,))]


def get_init_inputs():
    return []
