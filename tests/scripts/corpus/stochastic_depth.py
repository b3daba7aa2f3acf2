"""Stochastic depth for each sample by torch.rand, and a loss that samples its labels."""

from __future__ import annotations

import torch

from tests.scripts.corpus import keyed
from tests.scripts.corpus import ordinary as o


class Block(o.Block):
    def forward(self, x):
        kept = (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.8) / 0.8
        return x + kept * self.down(torch.tanh(self.up(self.norm(x))))


def sampled_loss(output, batch):
    chosen = torch.rand(batch["targets"].shape) < 0.7
    chosen[:, 0] = True
    return o.token_loss(output, {"targets": batch["targets"].masked_fill(~chosen, -100)})


def network():
    return o.Network(Block)


def optimizer_of(named):
    return torch.optim.RAdam(o.parameters(named), lr=1e-2)


def train(folder):
    o.trained(**o.arguments(o.made(network), loss=sampled_loss), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return keyed.loop(gpt, optimizer_of(gpt.named_parameters()), order, o.Text(), loss=sampled_loss)
