"""The script gives its own batches, of NumPy arrays in nested mappings."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

import elasticd
from tests.scripts.corpus import ordinary as o


def samples(step):
    random = np.random.default_rng(step)
    rows = random.integers(0, o.VOCABULARY, (o.BATCH, o.TOKENS + 1))
    return [{"text": {"ids": row[:-1]}, "targets": row[1:]} for row in rows]


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(o.VOCABULARY, o.WIDTH)

    def forward(self, batch):
        return self.tokens(batch["text"]["ids"])


def network():
    return o.Network(embed=Embed)


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    arguments = o.arguments(o.made(network), dataset=samples(0))
    job = elasticd.Job(**arguments, optimizer=optimizer_of)
    while (index := job.next(o.STEPS)) is not None:
        job.step(samples(index))


def plain(order):
    gpt = o.made(network)
    steps = [[step] for step in range(o.STEPS)]
    optimizer = optimizer_of(gpt.named_parameters())
    rows = {step: samples(step) for step in range(o.STEPS)}
    return o.loop(gpt, optimizer, steps, rows, collate=lambda chosen: default_collate(chosen[0]))
