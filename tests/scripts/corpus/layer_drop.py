"""Layer drop by Python's random, noise by NumPy, and blocks that recompute their activations."""

from __future__ import annotations

import random

import numpy as np
import torch

import elasticd
from tests.scripts.corpus import keyed
from tests.scripts.corpus import ordinary as o

LAYOUT = "tp"


class Block(o.Block):
    def forward(self, x):
        if self.training and random.random() < 0.3:
            return x
        return super().forward(x) * (1.0 + 0.1 * np.random.standard_normal())


def network():
    return o.Network(Block, layers=4)


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.1)


def train(folder):
    gpt = o.made(network)
    parallelism = elasticd.ParallelismOptions(recompute=True)
    arguments = o.arguments(gpt, model=o.cut_model(gpt), parallelism=parallelism)
    o.trained(**arguments, optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return keyed.loop(gpt, optimizer_of(gpt.named_parameters()), order, o.Text())
