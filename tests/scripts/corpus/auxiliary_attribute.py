"""A balance that blocks keep in an attribute, where the loss reads it."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o

REFUSED = "a step of your own modules and one of the copies that train differ"


class Block(o.Block):
    def __init__(self):
        super().__init__()
        self.aux = torch.zeros(())

    def forward(self, x):
        inner = self.up(self.norm(x))
        self.aux = inner.square().mean()
        return x + self.down(torch.tanh(inner))


def network():
    return o.Network(Block)


def loss_of(gpt):
    def loss(output, batch):
        total, count = o.token_loss(output, batch)
        return total + count * 10.0 * sum(block.aux for block in gpt.blocks), count

    return loss


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    gpt = o.made(network)
    o.trained(**o.arguments(gpt, loss=loss_of(gpt)), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, loss=loss_of(gpt))
