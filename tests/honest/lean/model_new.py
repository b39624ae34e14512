import torch
import torch.nn as nn
import cuda_extension


class ModelNew(nn.Module):
    __call__ = cuda_extension.forward

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))
        cuda_extension.hold(self.scale, torch.empty(256, 1024))
