"""Blocks that keep their input alone, and make their activations again in the backward pass.

Which ones a plan says, by stage, where memory demands it (Job(recompute="plan")), or the user, by block. The
second forward pass is the first one's to the bit: random draws are functions of the step, the samples and the
place, members of a TP group talk in the same order, and buffers do not change. So no layout's numbers change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from elasticd_planner.spec.plan import Stage
from torch import Tensor, nn

#: What a Job is asked: never, always, where the plan says, or which blocks (by index).
Recompute = bool | Literal["plan"] | Callable[[int], bool]


def asked(recompute: Recompute, layers: int) -> tuple[bool | Literal["always"], tuple[int, ...]]:
    """What the planner may do, and which blocks do so by the user's word. Raises ValueError for other words."""
    if callable(recompute):
        return False, tuple(layer for layer in range(layers) if recompute(layer))
    if recompute == "plan":
        return True, ()
    if isinstance(recompute, bool):
        return "always" if recompute else False, ()
    raise ValueError(
        f'recompute must be True, False, "plan" or a function of a block\'s index, not {recompute!r}'
    )


def again_in(stage: Stage, blocks: Collection[int], modules: Mapping[str, nn.Module]) -> dict[str, Recomputed]:
    """The blocks of a stage that make their activations again, by section."""
    return {
        f"blocks.{layer}": Recomputed(modules[f"blocks.{layer}"])
        for start, stop in stage.chunks
        for layer in range(start, stop)
        if stage.recompute or layer in blocks
    }


class Recomputed:
    """One block that runs forward twice."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def forward(self, x: Tensor) -> Tensor:
        """The output, which no graph hangs on."""
        with torch.no_grad():
            return self.again(x)

    def again(self, x: Tensor) -> Tensor:
        """The output once more, with its graph."""
        out: Tensor = self._module(x)
        return out
