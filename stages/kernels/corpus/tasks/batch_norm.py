"""Batch normalisation with running statistics: two buffers that count, and one that only takes its place."""

import torch
from torch import nn

batch = 16
channels = 61
height = 149
width = 149
eps = 1e-5


class Model(nn.Module):
    def __init__(self, channels, eps):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, eps=eps)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(batch, channels, height, width)]


def get_init_inputs():
    return [channels, eps]
