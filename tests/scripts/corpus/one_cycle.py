"""One cycle of the learning rate and of the first moment."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler

from tests.scripts.corpus import ordinary as o


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def scheduler_of(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=o.STEPS + 1)


def train(folder):
    o.trained(**o.arguments(o.made()), optimizer=optimizer_of, scheduler=scheduler_of)


def plain(order):
    gpt = o.made()
    optimizer = optimizer_of(gpt.named_parameters())
    return o.loop(gpt, optimizer, order, scheduler=scheduler_of(optimizer))
