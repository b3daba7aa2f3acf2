"""Early stopping by `break`: the loss of the step decides, the same on every rank."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o

#: The step after which both forms leave their loop.
LAST = o.STEPS - 2
#: The phase of the job then: the same command goes on from the checkpoint.
PHASE = "stopped"


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    checkpoints = elasticd.CheckpointingOptions(folder=folder, every=100, snapshot_every=2)
    job = elasticd.Job(**o.arguments(o.made(), checkpointing=checkpoints), optimizer=optimizer_of)
    for step in job.steps(1000):
        if step.index == LAST:
            break


def plain(order):
    gpt = o.made()
    optimizer = optimizer_of(gpt.named_parameters())
    outcome = o.loop(gpt, optimizer, order, after=lambda step, loss: step == LAST)
    return o.Outcome(outcome.losses, {}, {"steps saved": LAST + 1})
