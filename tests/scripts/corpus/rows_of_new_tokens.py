"""Trains the embedding's rows of new tokens alone, by a hook on the parameter."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o

REFUSED = "has a hook (register_hook or register_post_accumulate_grad_hook)"


def hooked(gpt):
    mask = torch.zeros(o.VOCABULARY, 1, dtype=torch.float64)
    mask[7:] = 1.0
    gpt.embed.tokens.weight.register_hook(lambda gradient: gradient * mask)
    return gpt


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.5)


def train(folder):
    o.trained(**o.arguments(hooked(o.made())), optimizer=optimizer_of)


def plain(order):
    gpt = hooked(o.made())
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
