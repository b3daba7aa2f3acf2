"""Dropouts of the attention's output and inside of the cut part of a TP group."""

from __future__ import annotations

import torch
from torch import nn

import elasticd
from tests.scripts.corpus import keyed
from tests.scripts.corpus import ordinary as o

LAYOUT = "tp"


class Block(o.Block):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Dropout(0.2), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.outer(self.down(self.inner(torch.tanh(self.up(self.norm(x))))))


def network():
    return o.Network(Block)


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    gpt = o.made(network)
    rules = {
        "blocks.*.up.*": elasticd.Column("columns"),
        "blocks.*.inner": elasticd.Sharded("columns", dim=-1),
        "blocks.*.down.*": elasticd.Row("columns"),
    }
    model = elasticd.Model(embed=gpt.embed, blocks=gpt.blocks, head=gpt.head, rules=rules)
    o.trained(**o.arguments(gpt, model=model), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return keyed.loop(gpt, optimizer_of(gpt.named_parameters()), order, o.Text())
