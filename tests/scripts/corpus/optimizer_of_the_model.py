"""An optimizer of the script's own model in place of the parameters that the function is given."""

from __future__ import annotations

import torch

from tests.scripts.corpus import ordinary as o

REFUSED = "that its function was not called with"


def train(folder):
    gpt = o.made()
    o.trained(**o.arguments(gpt), optimizer=lambda named: torch.optim.AdamW(gpt.parameters(), lr=1e-2))


def plain(order):
    gpt = o.made()
    return o.loop(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-2), order)
