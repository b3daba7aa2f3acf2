"""L2 regularisation in the loss, by the parameters of the script's own model."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o

REFUSED = "a function that closes over your module reaches it"


def loss_of(gpt):
    def loss(output, batch):
        total, count = o.token_loss(output, batch)
        return total + count * 0.1 * sum(p.square().sum() for p in gpt.parameters()), count

    return loss


def optimizer_of(named):
    return torch.optim.SGD(o.parameters(named), lr=0.1)


def train(folder):
    gpt = o.made()
    o.trained(**o.arguments(gpt, loss=loss_of(gpt)), optimizer=optimizer_of)


def plain(order):
    gpt = o.made()
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order, loss=loss_of(gpt))
