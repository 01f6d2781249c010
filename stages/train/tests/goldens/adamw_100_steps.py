"""Prints what torch's AdamW makes of the model of optimizer.rs' tests after 100 steps: adamw_100_steps.json."""

import json
import math

import torch

bias = torch.nn.Parameter(torch.tensor([0.5, -0.5]))
w = torch.nn.Parameter(torch.tensor([1.0, -2, 3, 0.1, 0.2, -0.3]).view(3, 2))
opt = torch.optim.AdamW(
    [{"params": [w], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}],
    lr=0.01,
    betas=(0.9, 0.999),
    eps=1e-8,
    foreach=False,
)
for step in range(100):
    x = torch.arange(3, dtype=torch.float32) * math.sin(step * 0.7)
    out = torch.tanh((x.unsqueeze(0) @ w).squeeze(0) + bias)
    opt.zero_grad()
    ((out - 0.3) ** 2).sum().backward()
    opt.step()
print(json.dumps([*bias.detach().tolist(), 9.0, *w.detach().flatten().tolist()]))
