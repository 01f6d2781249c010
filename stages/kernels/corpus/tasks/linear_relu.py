"""A linear layer and ReLU: a product with a transposed matrix, a bias, and what eager does in a pass of its own."""

import torch
from torch import nn

batch = 1021
features = 517
hidden = 1031


class Model(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.linear = nn.Linear(features, hidden)

    def forward(self, x):
        return torch.relu(self.linear(x))


def get_inputs():
    return [torch.randn(batch, features)]


def get_init_inputs():
    return [features, hidden]
