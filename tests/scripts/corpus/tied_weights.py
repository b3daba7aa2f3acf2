"""A head whose weight is that of the embedding."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(o.WIDTH), nn.Linear(o.WIDTH, o.VOCABULARY, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


def network():
    gpt = o.Network(head=Head)
    gpt.head.out.weight = gpt.embed.tokens.weight
    return gpt


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
