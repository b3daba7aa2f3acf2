"""Weight norm as torch had it before parametrisations: a hook before forward computes the weight."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o


class Block(o.Block):
    def __init__(self):
        super().__init__()
        torch.nn.utils.weight_norm(self.up)


def network():
    return o.Network(Block)


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.1, momentum=0.9)


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
