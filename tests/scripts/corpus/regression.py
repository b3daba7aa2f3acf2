"""Regression of two targets with a Huber loss, and an optimizer whose learning rate is a tensor."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o

LAYOUT = "tp"


class Points:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(o.TOKENS, 4, generator=generator, dtype=torch.float64)
        return {"x": x, "y": torch.stack([x.sin().sum(), x.square().mean()])}


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, o.WIDTH)

    def forward(self, batch):
        return self.project(batch["x"])


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(o.WIDTH, 2)

    def forward(self, x):
        return self.out(x.mean(1))


def loss(output, batch):
    return nn.functional.huber_loss(output, batch["y"], reduction="sum"), output.numel()


def network():
    return o.Network(embed=Embed, head=Head)


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=torch.tensor(1e-2), amsgrad=True)


def train(folder):
    gpt = o.made(network)
    arguments = o.arguments(gpt, model=o.cut_model(gpt), loss=loss, dataset=Points())
    o.trained(**arguments, optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, Points(), loss=loss)
