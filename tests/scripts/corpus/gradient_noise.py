"""Noise on gradients, in a hook before the optimizer's step."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o

REFUSED = "steps on a part of a parameter unlike on the whole"


def optimizer_of(named):
    optimizer = torch.optim.SGD(o.parameters(named), lr=0.1)

    def add_noise(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(0.01 * torch.randn_like(parameter))

    optimizer.register_step_pre_hook(add_noise)
    return optimizer


def train(folder):
    o.trained(**o.arguments(o.made()), optimizer=optimizer_of)


def plain(order):
    gpt = o.made()
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
