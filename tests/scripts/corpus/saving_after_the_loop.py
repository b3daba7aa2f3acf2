"""A script that evaluates and saves when all steps are made, behind the loop."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    evaluation = elasticd.EvaluationOptions(held_out=elasticd.HeldOut(dataset=o.Text(7, first=1000)))
    job = elasticd.Job(**o.arguments(o.made(), evaluation=evaluation), optimizer=optimizer_of)
    for _ in job.steps(o.STEPS):
        pass
    held_out, state = job.evaluate(), job.state_dict()
    assert held_out is not None, "this device is in the plan"
    if not state:  # another rank has it
        return {}
    return {"loss": held_out.loss, "sum": float(sum(value.sum() for value in state.values()))}


def plain(order):
    gpt, held_out = o.made(), o.Text(7, first=1000)
    outcome = o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
    outcome.notes = {
        "loss": o.held_out_loss(gpt, held_out),
        "sum": float(sum(p.detach().sum() for p in gpt.parameters())),
    }
    return outcome
