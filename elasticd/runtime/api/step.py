"""`Step`: the result of a training step, for the script."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """A finished step, the same on every rank."""

    index: int  #: of the step, from 0
    loss: float  #: mean over all targets of the global batch; NaN: the batch had no target
    norm: float  #: of the gradient, before clipping; infinite: a gradient was not finite
    tokens: int  #: of the global batch
    samples: tuple[int, ...]  #: indices in the dataset that were trained on; all ranks have verified them
    plan: int  #: number of the plan that the step ran under
    applied: bool  #: the update was made: all gradients were finite, and there was a target
