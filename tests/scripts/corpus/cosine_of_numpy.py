"""A cosine whose length was computed with NumPy."""

from __future__ import annotations

import numpy as np
import torch
from torch.optim import lr_scheduler

from tests.scripts.corpus import ordinary as o


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def scheduler_of(optimizer):
    epochs = np.ceil(64 / o.BATCH * 1.5)
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs.astype(np.int64))


def train(folder):
    o.trained(**o.arguments(o.made()), optimizer=optimizer_of, scheduler=scheduler_of)


def plain(order):
    gpt = o.made()
    optimizer = optimizer_of(gpt.named_parameters())
    return o.loop(gpt, optimizer, order, scheduler=scheduler_of(optimizer))
