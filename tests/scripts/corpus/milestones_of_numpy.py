"""Milestones as NumPy makes them, beside checkpoints."""

from __future__ import annotations

import numpy as np
import torch

import elasticd
from tests.scripts.corpus import ordinary as o


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=np.float64(0.1), momentum=0.9, nesterov=True)


def scheduler_of(optimizer):
    milestones = (np.array([0.3, 0.6]) * o.STEPS).astype(int)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.3)


def train(folder):
    checkpoints = elasticd.CheckpointingOptions(folder=folder, every=2)
    arguments = o.arguments(o.made(), checkpointing=checkpoints)
    o.trained(**arguments, optimizer=optimizer_of, scheduler=scheduler_of)


def plain(order):
    gpt = o.made()
    optimizer = optimizer_of(gpt.named_parameters())
    return o.loop(gpt, optimizer, order, scheduler=scheduler_of(optimizer))
