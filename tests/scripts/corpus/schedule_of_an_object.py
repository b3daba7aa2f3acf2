"""A LambdaLR of an object that holds a configuration."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.scripts.corpus import ordinary as o

REFUSED = "cannot be carried to other ranks"


class Warmup:
    def __init__(self, config):
        self.config = config

    def __call__(self, step):
        return min(1.0, (step + 1) / self.config.warmup)


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup(SimpleNamespace(warmup=4)))


def train(folder):
    o.trained(**o.arguments(o.made()), optimizer=optimizer_of, scheduler=scheduler_of)


def plain(order):
    gpt = o.made()
    optimizer = optimizer_of(gpt.named_parameters())
    return o.loop(gpt, optimizer, order, scheduler=scheduler_of(optimizer))
