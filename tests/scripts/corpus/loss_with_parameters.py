"""Uncertainty weights: a loss with parameters of its own, which the optimizer gets, too."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o

REFUSED = "that its function was not called with"


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, output, batch):
        total, count = o.token_loss(output, batch)
        return total * torch.exp(-self.s).sum() + self.s.sum() * count, count


def train(folder):
    criterion = Weighted()
    o.trained(
        **o.arguments(o.made(), loss=criterion),
        optimizer=lambda named: torch.optim.SGD([*o.parameters(named), *criterion.parameters()], lr=0.1),
    )


def plain(order):
    gpt, criterion = o.made(), Weighted()
    optimizer = torch.optim.SGD([*gpt.parameters(), *criterion.parameters()], lr=0.1)
    return o.loop(gpt, optimizer, order, loss=criterion)
