"""Evaluation every few steps on two held-out sets, and the weights at the end."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o


def optimizer_of(named):
    return torch.optim.Adagrad(o.parameters(named), lr=0.05)


def train(folder):
    gpt, notes = o.made(), {}
    sets = {"near": o.Text(7, first=1000), "far": o.Text(9, first=2000)}
    held_out = {name: elasticd.HeldOut(dataset=each) for name, each in sets.items()}
    job = elasticd.Job(
        **o.arguments(gpt, evaluation=elasticd.EvaluationOptions(held_out=held_out)), optimizer=optimizer_of
    )
    for step in job.steps(o.STEPS):
        if step.index % 5 == 4:
            for name in sets:
                notes[f"{name} {step.index}"] = job.evaluate(name).loss
        if step.index == o.STEPS - 1:
            state = job.state_dict()
            if job.rank == 0:
                trained = o.made()  # new modules: those of the job have no values any more
                trained.load_state_dict({name: value.double() for name, value in state.items()})
                notes["sum"] = float(sum(p.sum() for p in trained.parameters()))
    return notes


def plain(order):
    gpt, notes = o.made(), {}
    sets = {"near": o.Text(7, first=1000), "far": o.Text(9, first=2000)}

    def after(step, loss):
        if step % 5 == 4:
            for name, each in sets.items():
                notes[f"{name} {step}"] = o.held_out_loss(gpt, each)

    outcome = o.loop(gpt, optimizer_of(gpt.named_parameters()), order, after=after)
    notes["sum"] = float(sum(p.detach().sum() for p in gpt.parameters()))
    outcome.notes = notes
    return outcome
