import torch
from torch import nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.norm = nn.InstanceNorm2d(num_features, affine=True)

    def forward(self, x):
        x = self.norm(x)
        return F.softsign(x)


num_features = 24


def get_inputs():
    return [torch.randn(512, num_features, 32, 32)]


def get_init_inputs():
    return [num_features]
