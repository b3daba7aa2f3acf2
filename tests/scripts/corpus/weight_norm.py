"""Weight norm by a parametrisation, a ParameterList, and steps of SGD that fall by an exponential."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o


class Block(o.Block):
    def __init__(self):
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.up)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(o.WIDTH)) for _ in range(2)])

    def forward(self, x):
        return super().forward(x * self.scales[0]) * self.scales[1]


def network():
    return o.Network(Block)


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.1, momentum=0.9)


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=optimizer_of, scheduler=scheduler_of)


def plain(order):
    gpt = o.made(network)
    optimizer = optimizer_of(gpt.named_parameters())
    return o.loop(gpt, optimizer, order, scheduler=scheduler_of(optimizer))
