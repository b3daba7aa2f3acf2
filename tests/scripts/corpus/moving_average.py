"""A moving average of the weights, which is what is evaluated, and a scalar parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elasticd
from tests.scripts.corpus import ordinary as o


class Block(o.Block):
    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))  # as in ReZero

    def forward(self, x):
        return x + self.alpha * self.down(torch.tanh(self.up(self.norm(x))))


def network():
    return o.Network(Block)


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=2e-2)


def train(folder):
    gpt, notes = o.made(network), {}
    held_out = elasticd.EvaluationOptions(held_out=elasticd.HeldOut(dataset=o.Text(10, first=1000)))
    job = elasticd.Job(
        **o.arguments(gpt, evaluation=held_out),
        optimizer=lambda named: elasticd.average(optimizer_of(named), decay=0.9),
    )
    for step in job.steps(o.STEPS):
        if step.index % 7 == 6:
            notes[f"held out {step.index}"] = job.evaluate(weights="average").loss
            state = job.state_dict("average")
            if job.rank == 0:
                notes[f"alpha {step.index}"] = float(state["blocks.0.alpha"])
    return notes


def plain(order):
    gpt, notes = o.made(network), {}
    mean = AveragedModel(gpt, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def after(step, loss):
        mean.update_parameters(gpt)
        if step % 7 == 6:
            notes[f"held out {step}"] = o.held_out_loss(mean, o.Text(10, first=1000))
            notes[f"alpha {step}"] = float(mean.module.blocks[0].alpha.detach())

    outcome = o.loop(gpt, optimizer_of(gpt.named_parameters()), order, after=after)
    outcome.notes = notes
    return outcome
