"""Gradual freezing in the body of the loop, by the script's own modules."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o

REFUSED = "is of the module that you gave to the job"


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.1)


def train(folder):
    gpt = o.made()
    job = elasticd.Job(**o.arguments(gpt), optimizer=optimizer_of)
    for step in job.steps(o.STEPS):
        if step.index == 2:
            gpt.embed.requires_grad_(False)


def plain(order):
    gpt = o.made()

    def after(step, loss):
        if step == 2:
            gpt.embed.requires_grad_(False)
            gpt.embed.zero_grad()

    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, after=after)
