"""Leaky ReLU in half precision; its slope is an argument of `__init__`, and no float exactly."""

import torch
from torch import nn

size = 45000003
negative_slope = 0.1


class Model(nn.Module):
    def __init__(self, negative_slope):
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x):
        return nn.functional.leaky_relu(x, self.negative_slope)


def get_inputs():
    return [torch.randn(size).half()]


def get_init_inputs():
    return [negative_slope]
