import torch
from torch import nn
import torch.nn.functional as F


class Model(nn.Module):
    def forward(self, x):
        x = F.softmin(x, dim=1)
        return torch.nansum(x, dim=3)


def get_inputs():
    return [torch.randn(64, 96, 32, 128)]


def get_init_inputs():
    return []
