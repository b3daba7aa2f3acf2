"""An embedding and a first block that are not trained, and two learning rates for the rest."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o


def network():
    gpt = o.Network(layers=3)
    gpt.embed.requires_grad_(False)
    gpt.blocks[0].requires_grad_(False)
    return gpt


def optimizer_of(named):
    named = [(name, p) for name, p in named if p.requires_grad]
    head = [p for name, p in named if name.startswith("head.")]
    rest = [p for name, p in named if not name.startswith("head.")]
    return torch.optim.RMSprop([{"params": rest, "lr": 1e-3}, {"params": head, "lr": 1e-2}], momentum=0.9)


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=optimizer_of)


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
