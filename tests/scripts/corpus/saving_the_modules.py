"""The last line of a plain script: torch.save of the modules that were handed over."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o

REFUSED = "is of the module that you gave to the job"


def optimizer_of(named):
    return torch.optim.AdamW(o.parameters(named), lr=1e-2)


def train(folder):
    gpt = o.made()
    o.trained(**o.arguments(gpt), optimizer=optimizer_of)
    folder.mkdir(exist_ok=True)
    torch.save(gpt.state_dict(), folder / "gpt.pt")


def plain(order):
    gpt = o.made()
    return o.loop(gpt, optimizer_of(gpt.named_parameters()), order)
