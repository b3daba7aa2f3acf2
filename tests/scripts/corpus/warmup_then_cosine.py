"""Warmup, then a cosine, as one sequence."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler

from tests.scripts.corpus import ordinary as o


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def scheduler_of(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, o.STEPS - 5)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])


def train(folder):
    o.trained(**o.arguments(o.made()), optimizer=optimizer_of, scheduler=scheduler_of)


def plain(order):
    gpt = o.made()
    optimizer = optimizer_of(gpt.named_parameters())
    return o.loop(gpt, optimizer, order, scheduler=scheduler_of(optimizer))
