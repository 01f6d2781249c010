"""Root-mean-square normalisation, written out: eager makes six passes of it. The inputs are small: `eps` counts."""

import torch
from torch import nn

rows = 4099
columns = 4011
eps = 1e-3


class Model(nn.Module):
    def __init__(self, columns, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.rand(columns) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(dim=1, keepdim=True) + self.eps) * self.weight


def get_inputs():
    return [torch.randn(rows, columns) * (torch.rand(rows, 1) + 0.5) / 10]


def get_init_inputs():
    return [columns, eps]
