"""LoRA by a forward hook that closes over the block's adapters."""

from __future__ import annotations

import torch
from torch import nn

from tests.scripts.corpus import ordinary as o

REFUSED = "a function that closes over your module reaches it"


class Block(o.Block):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(o.WIDTH, 2, bias=False), nn.Linear(2, o.WIDTH, bias=False)
        self.register_forward_hook(lambda module, args, out: out + self.b(self.a(args[0])))


def train(folder):
    gpt = o.made(lambda: o.Network(Block))
    o.trained(**o.arguments(gpt), optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2))


def plain(order):
    gpt = o.made(lambda: o.Network(Block))
    return o.loop(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-2), order)
