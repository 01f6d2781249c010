"""Layer normalisation with weights that are neither ones nor zeros."""

import torch
from torch import nn

rows = 5003
columns = 4099
eps = 1e-5


class Model(nn.Module):
    def __init__(self, columns, eps):
        super().__init__()
        self.norm = nn.LayerNorm(columns, eps=eps)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [3 * torch.randn(rows, columns) + torch.randn(rows, 1)]


def get_init_inputs():
    return [columns, eps]
