"""A dataset that draws: random flips and noise, as torchvision's transforms do, beside F.dropout."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

import elasticd
from tests.scripts.corpus import keyed
from tests.scripts.corpus import ordinary as o


class Augmented:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        pixels = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        if random.random() < 0.5:
            pixels = pixels.flip(-1)
        pixels = pixels + 0.1 * torch.randn(2, 4, 4, dtype=torch.float64)
        return {"pixels": pixels * float(np.random.uniform(0.8, 1.2)), "label": index % 5}


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, o.WIDTH)

    def forward(self, batch):
        return self.project(batch["pixels"].flatten(1).unflatten(1, (4, 8)))


class Block(o.Block):
    def forward(self, x):
        inner = torch.tanh(self.up(self.norm(x)))
        return x + self.down(nn.functional.dropout(inner, 0.2, self.training))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(o.WIDTH, 5)

    def forward(self, x):
        return self.out(x.mean(1))


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["label"], reduction="sum"), batch["label"].numel()


def network():
    return o.Network(Block, Embed, Head)


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.1, momentum=0.9)


def train(folder):
    net = o.made(network)
    job = elasticd.Job(
        model=elasticd.Model(embed=net.embed, blocks=net.blocks, head=net.head, width=o.WIDTH),
        loss=loss,
        optimizer=optimizer_of,
        dataset=Augmented(),
        global_batch=o.BATCH,
        seed=o.SEED,
        parallelism=elasticd.ParallelismOptions(recompute=True),
    )
    for _step in job.steps(o.STEPS):
        pass


def plain(order):
    net = o.made(network)
    return keyed.loop(net, optimizer_of(net.named_parameters()), order, Augmented(), loss=loss)
