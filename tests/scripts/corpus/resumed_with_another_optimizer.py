"""A script that is started again from its checkpoint, with AdamW in place of SGD."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o

REFUSED = "its optimizer is"


def train(folder):
    for steps, optimizer in (
        (4, lambda named: torch.optim.SGD(o.parameters(named), lr=0.1, momentum=0.9)),
        (8, lambda named: torch.optim.AdamW(o.parameters(named), lr=1e-2)),
    ):
        checkpoints = elasticd.CheckpointingOptions(folder=folder, every=2)
        job = elasticd.Job(**o.arguments(o.made(), checkpointing=checkpoints), optimizer=optimizer)
        for _step in job.steps(steps):
            pass


def plain(order):
    gpt = o.made()
    first = o.loop(gpt, torch.optim.SGD(gpt.parameters(), lr=0.1, momentum=0.9), order[:4])
    rest = o.loop(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-2), order[4:8])
    return o.Outcome([*first.losses, *rest.losses], rest.weights)
