"""A collate that pops keys and shifts in place; the same held-out set is evaluated several times."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o


def collate(samples):
    for sample in samples:
        sample["inputs"].add_(1).remainder_(o.VOCABULARY)  # shifted, as a mask is put in place
    return {name: torch.stack([sample.pop(name) for sample in samples]) for name in ("inputs", "targets")}


class Text(o.Text):
    def __getitem__(self, index):
        return {name: value.clone() for name, value in super().__getitem__(index).items()}


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    held_out = elasticd.HeldOut(dataset=Text(4, first=1000))
    evaluation = elasticd.EvaluationOptions(held_out=held_out)
    data = elasticd.DataOptions(collate=collate)
    arguments = o.arguments(o.made(), dataset=Text(), data=data, evaluation=evaluation)
    job, notes = elasticd.Job(**arguments, optimizer=optimizer_of), {}
    for step in job.steps(o.STEPS):
        if step.index % 5 == 4:
            notes[str(step.index)] = job.evaluate().loss
    return notes


def plain(order):
    gpt, notes = o.made(), {}

    def after(step, loss):
        if step % 5 == 4:
            notes[str(step)] = o.held_out_loss(gpt, Text(4, first=1000), collate)

    optimizer = optimizer_of(gpt.named_parameters())
    outcome = o.loop(gpt, optimizer, order, Text(), collate=collate, after=after)
    outcome.notes = notes
    return outcome
