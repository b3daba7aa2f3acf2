"""What a script is given of each step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """A finished step, the same on every rank: `loss` is the mean over all targets of the global batch, `norm`
    the gradient's before clipping, `samples` the dataset indices that were trained on (the vote compared what
    travelled through every rank with them), `plan` the number of the plan that it ran under."""

    index: int
    loss: float
    norm: float
    tokens: int
    samples: tuple[int, ...]
    plan: int
    applied: bool
