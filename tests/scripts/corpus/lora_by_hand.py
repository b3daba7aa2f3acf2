"""LoRA by hand: modules that hold a frozen linear layer and two small trained matrices."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o


class Adapted(nn.Module):
    def __init__(self, base, rank=2, scale=4.0):
        super().__init__()
        self.base, self.scale = base, scale
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scale * nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def network():
    gpt = o.Network()
    for parameter in gpt.parameters():
        parameter.requires_grad_(False)
    for block in gpt.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return gpt


def optimizer_of(named):
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=2e-2)


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
