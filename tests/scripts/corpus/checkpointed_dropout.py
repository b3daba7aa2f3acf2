"""torch.utils.checkpoint inside of a block, around two calls of one nn.Dropout."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.scripts.corpus import keyed
from tests.scripts.corpus import ordinary as o


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(o.WIDTH, o.WIDTH), nn.Linear(o.WIDTH, o.WIDTH)
        self.drop = nn.Dropout(0.3)

    def first(self, x):
        return self.drop(torch.tanh(self.one(x)))

    def second(self, x):
        return self.drop(torch.tanh(self.two(x)))

    def forward(self, x):
        x = x + self.run(self.first, x)
        return x + self.run(self.second, x)

    def run(self, part, x):
        return checkpoint(part, x, use_reentrant=False)


class Kept(Block):
    """The same, which keeps its activations."""

    def run(self, part, x):
        return part(x)


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.3)


def train(folder):
    o.trained(**o.arguments(o.made(lambda: o.Network(Block))), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(lambda: o.Network(Kept))
    return keyed.loop(gpt, optimizer_of(gpt.named_parameters()), order, o.Text())
