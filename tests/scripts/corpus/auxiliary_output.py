"""Mixture of experts by hand: the router's balance is an output of the blocks, which the loss adds."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o

EXPERTS = 3


class Embed(o.Embed):
    def forward(self, batch):
        hidden = super().forward(batch)
        return {"hidden": hidden, "balance": hidden.new_zeros(hidden.shape[0])}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(o.WIDTH), nn.Linear(o.WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(o.WIDTH, o.WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        hidden = self.norm(x["hidden"])
        weights = self.router(hidden).softmax(-1)
        mixed = sum(weights[..., i : i + 1] * torch.tanh(each(hidden)) for i, each in enumerate(self.experts))
        balance = x["balance"] + weights.mean(1).square().sum(-1)
        return {"hidden": x["hidden"] + mixed, "balance": balance}


class Head(o.Head):
    def forward(self, x):
        return {"logits": super().forward(x["hidden"]), "balance": x["balance"]}


def balanced_loss(output, batch):
    total, count = o.token_loss(output["logits"], batch)
    return total + 0.5 * o.TOKENS * output["balance"].sum(), count


def network():
    return o.Network(Block, Embed, Head)


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    o.trained(**o.arguments(o.made(network), loss=balanced_loss), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, loss=balanced_loss)
