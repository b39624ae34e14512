import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def forward(self, logits, targets):
        return F.cross_entropy(logits, targets, reduction="none")


def get_inputs():
    return [torch.randn(6000, 2500), torch.randint(0, 2500, (6000,))]


def get_init_inputs():
    return []
