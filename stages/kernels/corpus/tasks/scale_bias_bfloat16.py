"""A scale and a bias per column, in bfloat16. There are fewer rows than columns: an index by row stays in bounds."""

import torch
from torch import nn

rows = 4099
columns = 8197


class Model(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.scale = nn.Parameter((torch.rand(columns) + 0.5).bfloat16())
        self.bias = nn.Parameter(torch.randn(columns).bfloat16())

    def forward(self, x):
        return x * self.scale + self.bias


def get_inputs():
    return [torch.randn(rows, columns).bfloat16()]


def get_init_inputs():
    return [columns]
