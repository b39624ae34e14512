import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return F.leaky_relu(torch.sigmoid(x) * self.scale - 0.3, 0.1)

def get_inputs():
    return [torch.randn(16, 1024)]

def get_init_inputs():
    return []
