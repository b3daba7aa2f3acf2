"""A learning rate that falls when the loss does not."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler

from tests.scripts.corpus import ordinary as o

REFUSED = "asks for a value"


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def scheduler_of(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)


def train(folder):
    o.trained(**o.arguments(o.made()), optimizer=optimizer_of, scheduler=scheduler_of)


def plain(order):
    gpt = o.made()
    optimizer = optimizer_of(gpt.named_parameters())
    return o.loop(gpt, optimizer, order, scheduler=scheduler_of(optimizer))
