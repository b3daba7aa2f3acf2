"""Early stopping by `break`: the loss of the step decides, the same on every rank."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o

#: The step after which both forms leave their loop.
LAST = o.STEPS - 2


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    checkpoints = elasticd.CheckpointingOptions(folder=folder, every=100, snapshot_every=2)
    job = elasticd.Job(**o.arguments(o.made(), checkpointing=checkpoints), optimizer=optimizer_of)
    for step in job.steps(1000):
        if step.index == LAST:
            break
    saved = max(path.name for path in folder.glob("step-*"))
    return {"steps saved": int(saved.split(".")[0].removeprefix("step-"))}


def plain(order):
    gpt = o.made()
    optimizer = optimizer_of(gpt.named_parameters())
    outcome = o.loop(gpt, optimizer, order, after=lambda step, loss: step == LAST)
    return o.Outcome(outcome.losses, {}, {"steps saved": LAST + 1})
