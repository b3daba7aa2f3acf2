"""`if job.rank == 0: torch.save(job.state_dict(), ...)`: the line that every script has."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    job, notes = elasticd.Job(**o.arguments(o.made()), optimizer=optimizer_of), {}
    for step in job.steps(o.STEPS):
        if step.index == 3 and job.rank == 0:
            notes["sum"] = float(sum(value.sum() for value in job.state_dict().values()))
    return notes


def plain(order):
    gpt, notes = o.made(), {}

    def after(step, loss):
        if step == 3:
            notes["sum"] = float(sum(p.detach().sum() for p in gpt.parameters()))

    outcome = o.loop(gpt, optimizer_of(gpt.named_parameters()), order, after=after)
    outcome.notes = notes
    return outcome
