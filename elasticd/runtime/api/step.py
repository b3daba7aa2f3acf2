"""What a script is given of each step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """A finished step, the same on every rank: `loss` is the mean over all targets of the global batch, `norm`
    the gradient's before clipping, `samples` the dataset indices that were trained on (the vote compared what
    travelled through every rank with them), `plan` the number of the plan that it ran under. `applied`: the
    update was made. It is not where a gradient is not finite (`norm` is then infinite), nor where the loss
    counted no target in the whole batch (`loss` is then NaN)."""

    index: int
    loss: float
    norm: float
    tokens: int
    samples: tuple[int, ...]
    plan: int
    applied: bool
