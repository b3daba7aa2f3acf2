"""Activation checkpointing: a block keeps only its input, and recomputes its activations in the backward pass.

The plan says which stages do, where memory demands it (`ParallelismOptions(recompute="plan")`), or the user
says which blocks do. The second forward pass equals the first one to the bit: random draws are functions of
step, samples and place, members of a TP group communicate in the same order, and buffers do not change. So
recomputation changes no result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any, Literal

import torch
from elasticd_planner.spec.plan import Stage
from torch import Tensor, nn

from elasticd.runtime.model.bundle import Bundle, tensors
from elasticd.runtime.model.local_model import LocalModel
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.parallel.packed_row import first_pass, second_pass

#: Which blocks recompute: none, all, those that the plan says, or those for whose index the function is true.
Recompute = bool | Literal["plan"] | Callable[[int], bool]


def asked(recompute: Recompute, layers: int) -> tuple[bool | Literal["always"], tuple[int, ...]]:
    """The meaning of `recompute` for the planner and for a model of `layers` blocks.

    Returns:
        Whether stages may recompute, or always do; and the blocks that the user names.

    Raises:
        ValueError: `recompute` is something else.
    """
    if callable(recompute):
        return False, tuple(layer for layer in range(layers) if recompute(layer))
    if recompute == "plan":
        return True, ()
    if isinstance(recompute, bool):
        return "always" if recompute else False, ()
    raise ValueError(
        f'recompute must be True, False, "plan" or a function of a block\'s index, not {recompute!r}'
    )


def recomputed_blocks(stage: Stage, blocks: Collection[int], local: LocalModel) -> dict[str, CheckpointedBlock]:
    """The blocks of a stage that recompute, by section: all where the plan says so, and those in `blocks`."""
    return {
        (section := f"blocks.{layer}"): CheckpointedBlock(
            section, local.modules[section], local.passes[section]
        )
        for start, stop in stage.chunks
        for layer in range(start, stop)
        if stage.recompute or layer in blocks
    }


class CheckpointedBlock:
    """One block that runs forward twice."""

    def __init__(self, section: str, module: nn.Module, passed: Callable[..., Any]) -> None:
        self._section, self._passed = section, passed
        self._trains = any(parameter.requires_grad for parameter in module.parameters())

    def forward(self, entered: Bundle) -> Bundle:
        """The output, without an autograd graph.

        Which of named tensors would need a gradient is not known without one. All floating-point tensors that
        the block made are said to; those that passed through it as they came are as they were.

        Raises:
            ModelError: the block changed a tensor that it was called with.
        """
        named = {"the activation": entered} if isinstance(entered, Tensor) else entered
        versions = {name: x._version for name, x in named.items()}
        kept = first_pass(self._section) if torch.is_grad_enabled() else nullcontext()
        with torch.no_grad(), kept:
            out: Bundle = self._passed(_own(entered))
        for name, x in named.items():
            if x._version != versions[name] and torch.is_grad_enabled():
                what = name if x is entered else repr(name)
                raise ModelError(
                    f"{self._section} changed {what} in place, and recomputation would change it twice: make a "
                    "new tensor"
                )
        if isinstance(out, Tensor) or not torch.is_grad_enabled():
            return out
        came = {id(x): x.requires_grad for x in tensors(entered)}
        trains = self._trains or any(came.values())
        needs = {name: came.get(id(x), trains and x.is_floating_point()) for name, x in out.items()}
        return {name: x.detach().requires_grad_(needs[name]) for name, x in out.items()}

    def recompute(self, entered: Bundle) -> Bundle:
        """The output once more, with its autograd graph."""
        with second_pass(self._section):
            out: Bundle = self._passed(_own(entered))
        return out


def _own(entered: Bundle) -> Bundle:
    """The bundle in a mapping that the block may change."""
    return entered if isinstance(entered, Tensor) else dict(entered)
