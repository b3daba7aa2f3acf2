"""Experts in a profile: each has as many rows as any other, and their part of a block is measured by itself.

A model that was not trained yet sends most rows to few experts, another one with each seed. Plans count experts
as even as shares, and a job knows its load later: so the rows of a pass go to the experts in turn.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.model.rng import Dropout
from elasticd.runtime.model.tp_rules import takes_rows
from elasticd.runtime.reference.parts import ProfiledPart


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """A module of a section that is called with rows, the experts of each, and their weights."""

    path: str  #: in the section
    count: int  #: of all experts
    names: tuple[str, ...]  #: of the three arguments
    random: bool  #: it drops elements at random

    @classmethod
    def all_of(cls, section: nn.Module) -> Iterator[StackedExperts]:
        """Those of a section with all experts, whose `forward` is the user's."""
        for path, module in section.named_modules():
            sizes = [each.shape[0] for each in module.parameters(recurse=False) if each.dim() > 2]
            if sizes and takes_rows(module):
                yield cls(
                    path=path,
                    count=sizes[0],
                    names=tuple(inspect.signature(module.forward).parameters)[:3],
                    random=any(isinstance(each, Dropout) for each in module.modules()),
                )

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The three of a call."""
        given = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        return tuple(given[name] for name in self.names)

    def in_turn(self, index: Any) -> Any:
        """The experts of each row [rows, k], in turn; numbers of none of the stacked ones stay."""
        if not isinstance(index, Tensor) or index.dim() != 2 or index.dtype.is_floating_point:
            return index
        turns = torch.arange(index.numel(), device=index.device).view_as(index) % self.count
        return turns.to(index.dtype).where(index < self.count, index)


def even(module: nn.Module, whole: nn.Module) -> None:
    """Has the experts of a section take the rows of each pass in turn, whatever its router chooses.

    Args:
        module: the section, on a member of a TP group.
        whole: it with all experts.
    """
    for each in StackedExperts.all_of(whole):

        def hook(_: nn.Module, args: Any, kwargs: Any, stacked: StackedExperts = each) -> Any:
            rows, index, *rest = stacked.arguments(args, kwargs)
            others = {name: value for name, value in kwargs.items() if name not in stacked.names}
            return (rows, stacked.in_turn(index), *rest, *args[3:]), others

        module.get_submodule(each.path).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def lone_experts(whole: nn.Module) -> StackedExperts | None:
    """The module with experts of a block that can be measured by itself.

    Args:
        whole: the block with all experts.

    Returns:
        None: there is none, or there are several, or it drops elements at random.
    """
    match [*StackedExperts.all_of(whole)]:
        case [one] if not one.random:
            return one
    return None


def entering_experts(stacked: StackedExperts, block: ProfiledPart, given: Any) -> dict[str, Tensor]:
    """The arguments of the experts of a block in a pass of it, as a bundle of rows, index and weights.

    Args:
        stacked: the experts.
        block: the block.
        given: what it is called with.
    """
    found: dict[str, Tensor] = {}

    def caught(_: nn.Module, args: Any, kwargs: Any) -> None:
        for name, x in zip(("rows", "index", "weights"), stacked.arguments(args, kwargs), strict=True):
            found[name] = x.detach().requires_grad_(x.requires_grad)

    hook = block.module.get_submodule(stacked.path).register_forward_pre_hook(caught, with_kwargs=True)
    try:
        block.forward(given)
    finally:
        hook.remove()
    return found


def experts_of(stacked: StackedExperts, block: ProfiledPart, label: str) -> ProfiledPart:
    """The experts of a block as a part of their own.

    Args:
        stacked: the experts.
        block: the block.
        label: of timings of the experts.
    """
    experts = block.module.get_submodule(stacked.path)

    def passed(given: Mapping[str, Tensor]) -> Any:
        if (entering := block.module.__dict__.get("entering")) is not None:
            entering.clear()  # as the block's own hooks do
        return experts(given["rows"], given["index"], given["weights"])

    return replace(block, label=label, module=experts, passed=passed)
