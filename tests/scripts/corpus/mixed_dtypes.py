"""Tokens in int8, features in float32 and float16, targets in uint8, under a model in float64."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o


class Mixed:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, o.VOCABULARY, (o.TOKENS + 1,), generator=generator)
        feature = torch.rand(o.TOKENS, 3, generator=generator, dtype=torch.float32)
        return {
            "inputs": ids[:-1].to(torch.int8),
            "feature": feature,
            "weight": feature[:, 0].half(),
            "targets": ids[1:].to(torch.uint8),
        }


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.feature = nn.Embedding(o.VOCABULARY, o.WIDTH), nn.Linear(3, o.WIDTH)

    def forward(self, batch):
        hidden = self.tokens(batch["inputs"].long()) * batch["weight"].double().unsqueeze(-1)
        return hidden + self.feature(batch["feature"].double())


def network():
    return o.Network(embed=Embed)


def loss(output, batch):
    targets = batch["targets"].long().flatten()
    return nn.functional.cross_entropy(output.flatten(0, 1), targets, reduction="sum"), targets.numel()


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.2, momentum=0.9)


def train(folder):
    o.trained(**o.arguments(o.made(network), loss=loss, dataset=Mixed()), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, Mixed(), loss=loss)
