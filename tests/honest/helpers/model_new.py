import torch
import torch.nn as nn

import cuda_extension


def rows_of(x):
    return x.reshape(-1, x.size(-1)).contiguous()


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def answer(self, rows):
        out = rows.new_empty(rows.shape)
        cuda_extension.forward(rows, self.scale, out)
        return out

    def forward(self, x):
        return self.answer(rows_of(x)).view(x.shape)
