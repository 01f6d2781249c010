"""The mean squared error. Each draw has an error of its own, and its tensors belong together: no closed form fits."""

import torch
from torch import nn

batch = 2003
features = 8501


class Model(nn.Module):
    def forward(self, prediction, target):
        return nn.functional.mse_loss(prediction, target)


def get_inputs():
    target = torch.randn(batch, features)
    return [target * (2 + 3 * torch.rand(())) + torch.randn(batch, features), target]


def get_init_inputs():
    return []
