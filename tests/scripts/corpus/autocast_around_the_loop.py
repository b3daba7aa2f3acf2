"""Mixed precision as in a plain script, but around the loop: there is no forward call to wrap."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o

REFUSED = "torch.autocast is on around the job's loop"


def made():
    torch.manual_seed(0)
    return o.Network()


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.5)


def train(folder):
    job = elasticd.Job(**o.arguments(made()), optimizer=optimizer_of)
    with torch.autocast("cpu", torch.bfloat16):
        for _step in job.steps(o.STEPS):
            pass


def plain(order):
    gpt = made()

    def loss(output, batch):
        return o.token_loss(output, batch)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, loss=loss)
