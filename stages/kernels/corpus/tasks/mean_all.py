"""The mean of all elements, a scalar. Every draw has a mean of its own, so that no constant passes."""

import torch
from torch import nn

rows = 7001
columns = 5003


class Model(nn.Module):
    def forward(self, x):
        return x.mean()


def get_inputs():
    return [torch.randn(rows, columns) + 1 + 4 * torch.rand(())]


def get_init_inputs():
    return []
