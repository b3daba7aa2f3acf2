"""Blocks that keep their input alone, and make their activations again in the backward pass.

Which ones a plan says, by stage, where memory demands it (Job(recompute="plan")), or the user, by block. The
second forward pass is the first one's to the bit: random draws are functions of the step, the samples and the
place, members of a TP group talk in the same order, and buffers are what they were. So no layout's numbers
change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from elasticd_planner.plan import Stage
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


#: A buffer that forward changed: its module, its name there, what it was.
_Before = tuple[nn.Module, str, Tensor]


class Recomputed:
    """One block that runs forward twice."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def forward(self, x: Tensor) -> tuple[Tensor, list[_Before]]:
        """The output, which no graph hangs on, and what `again` needs besides x: almost always nothing."""
        before = [
            (owner, name, buffer, buffer._version, buffer.clone())
            for owner in self._module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        with torch.no_grad():
            out: Tensor = self._module(x)
        changed = [
            (owner, name, was)
            for owner, name, buffer, version, was in before
            if getattr(owner, name) is not buffer or buffer._version != version
        ]
        return out, changed

    def again(self, x: Tensor, changed: list[_Before]) -> Tensor:
        """The output once more, with its graph."""
        with _as_before(changed):
            out: Tensor = self._module(x)
        return out


@contextmanager
def _as_before(changed: list[_Before]) -> Iterator[None]:
    """Buffers as they were, for a while: what is done to them meanwhile was done already."""
    now = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    try:
        for owner, name, was in changed:
            setattr(owner, name, was)
        yield
    finally:
        for owner, name, buffer in now:
            setattr(owner, name, buffer)
