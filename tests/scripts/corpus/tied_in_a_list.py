"""A head that keeps the embedding in a list, so that it is not registered twice."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o

REFUSED = "where torch does not register it"


class Head(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.norm, self.tied = nn.LayerNorm(o.WIDTH), [tokens]

    def forward(self, x):
        return nn.functional.linear(self.norm(x), self.tied[0].weight)


def network():
    gpt = o.Network()
    gpt.head = Head(gpt.embed.tokens)
    return gpt


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.3)


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
