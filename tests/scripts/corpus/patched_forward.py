"""A forward that was replaced by a function around the old one."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o

REFUSED = "a function that closes over your module reaches it"


def network():
    gpt = o.Network()
    for block in gpt.blocks:
        inner = block.down.forward
        block.down.forward = lambda x, inner=inner: 0.5 * inner(x)
    return gpt


def train(folder):
    o.trained(**o.arguments(o.made(network)), optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2))


def plain(order):
    gpt = o.made(network)
    return o.loop(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-2), order)
