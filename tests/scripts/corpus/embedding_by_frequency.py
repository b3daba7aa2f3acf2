"""An embedding whose gradient is scaled by how often a token is in the batch."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o

REFUSED = "scale_grad_by_freq"


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(o.VOCABULARY, o.WIDTH, scale_grad_by_freq=True)

    def forward(self, batch):
        return self.tokens(batch["inputs"])


def network():
    return o.Network(embed=Embed)


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.3)


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
