import torch
import torch.nn as nn


class Model(nn.Module):
    """Gate with a table of positions, whose constructor computes what published constructors do."""

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        self.scale = nn.Parameter(torch.randn(features) * 0.02 + 1.0)
        position = torch.arange(256).float().unsqueeze(1)
        rates = torch.exp(torch.arange(0, features, 2) * (-4.0 / features))
        table = torch.zeros(256, features)
        table[:, 0::2] = torch.sin(position * rates)
        table[:, 1::2] = torch.cos(position * rates)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(features)[None]), persistent=False)
        self.register_buffer("step", torch.full((1,), torch.linspace(0, 1, 5)[1].item()), persistent=False)

    def forward(self, x):
        return (x + self.table) * self.scale + self.step


def get_inputs():
    return [torch.randn(256, 1024)]


def get_init_inputs():
    return [1024]
