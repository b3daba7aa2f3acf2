"""Gradual freezing and a schedule of an attribute, as functions of the step, by a callback."""

from __future__ import annotations

import torch

import elasticd
from tests.scripts.corpus import ordinary as o

FREEZES = 5


class Block(o.Block):
    temperature = 1.0

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)) / self.temperature))


def network():
    return o.Network(Block)


def schedule(sections, index):
    for name, module in sections.items():
        if name == "embed":
            module.requires_grad_(index < FREEZES)
        elif name != "head":
            module.temperature = 1.0 + 0.1 * index


class Schedule(elasticd.Callback):
    def before_step(self, job, index):
        schedule(job.modules(), index)


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=2e-2, weight_decay=0.1)


def train(folder):
    gpt = o.made(network)
    o.trained(**o.arguments(gpt, model=o.cut_model(gpt)), optimizer=optimizer_of, callbacks=[Schedule()])


def plain(order):
    gpt = o.made(network)
    sections = {"embed": gpt.embed} | {f"blocks.{i}": block for i, block in enumerate(gpt.blocks)}
    schedule(sections, 0)

    def after(step, loss):
        gpt.zero_grad()
        schedule(sections, step + 1)

    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, after=after)
