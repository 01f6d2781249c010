import torch
from torch import nn
import torch.nn.functional as F


class Model(nn.Module):
    def forward(self, x):
        x = F.softsign(x)
        return torch.nansum(x, dim=1)


def get_inputs():
    return [torch.randn(64, 256, 32, 32)]


def get_init_inputs():
    return []
