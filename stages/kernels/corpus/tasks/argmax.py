"""Where every row has its largest element: 64-bit integers, compared exactly. Of equals the first counts."""

import torch
from torch import nn

rows = 6007
columns = 5003


class Model(nn.Module):
    def forward(self, x):
        return torch.argmax(x, dim=1)


def get_inputs():
    return [torch.randn(rows, columns)]


def get_init_inputs():
    return []
