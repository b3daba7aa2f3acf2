"""`Step`: the result of a training step, for the script."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """A finished step, the same on every rank.

    Attributes:
        index: number of the step, from 0.
        loss: mean over all targets of the global batch; NaN: the batch had no target.
        norm: norm of the gradient, before clipping; infinite: a gradient was not finite.
        tokens: number of tokens of the global batch.
        samples: indices in the dataset that were trained on; all ranks have verified them.
        plan: number of the plan that the step ran under.
        balance: the balance loss of a block, its mean over targets and blocks, without its factor, 1 where all
            experts are alike; None: the job has no `Balance(loss=)`.
        applied: whether the update was made: all gradients were finite, and there was a target.
    """

    index: int
    loss: float
    norm: float
    tokens: int
    samples: tuple[int, ...]
    plan: int
    applied: bool
    balance: float | None = None
