"""A language model of LSTM layers."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(o.WIDTH, o.WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.rnn(x)[0]


def network():
    return o.Network(Layer)


def optimizer_of(named):
    return torch.optim.Adamax(o.parameters(named), lr=1e-2)


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=optimizer_of, clip=0.25)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, clip=0.25)
