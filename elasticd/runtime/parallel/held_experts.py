"""Experts of one member of a TP group: the part of a module's output that its own experts compute.

All members have all rows and the router's choice. A member expands the rows to pairs of a row and one of its
experts, calls the module with these, each with one expert, and adds the outputs up by row. So the module needs
no mark for experts of others, and computes no row in vain. Of an expert that several members have each takes
some rows, by their numbers. How many pairs there are is known in the pass alone, so that torch.compile calls
the module as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elasticd.runtime.model.graph_breaks import breaks_graphs


def held_experts(
    forward: Callable[..., Tensor], held: Sequence[Sequence[int]], rank: int, count: int
) -> Callable[..., Tensor]:
    """A forward of a module with experts, of which a member has some.

    Args:
        forward: of the module with the parameters of the member's: (rows [n, width], index [n, k],
            weights [n, k]) -> [n, width].
        held: by member the numbers of its experts, in the order in which it has them.
        rank: of the member.
        count: of all experts.

    Returns:
        A forward of the same arguments, which gives the member's term of the output.
    """
    names = tuple(inspect.signature(forward).parameters)[:3]
    own = HeldExperts(held, rank, count)

    def term(*args: Any, **kwargs: Any) -> Tensor:
        rows, index, weights = (*args, *(kwargs.pop(name) for name in names[len(args) :]))
        return _term(forward, own, rows, index, weights, **kwargs)

    return term


class HeldExperts:
    """The experts of one member, and which rows it takes of those that others have, too."""

    def __init__(self, held: Sequence[Sequence[int]], rank: int, count: int) -> None:
        """Arguments as of `held_experts`."""
        # Numbers that name no expert, as -1 or `count`, are nobody's.
        self._local, self._turn, self._turns = torch.full((3, count + 2), -1)
        for place, expert in enumerate(held[rank]):
            holders = [member for member, others in enumerate(held) if expert in others]
            self._local[expert], self._turn[expert] = place, holders.index(rank)
            self._turns[expert] = len(holders)
        self._count, self._shared = count, bool((self._turns > 1).any())

    @property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._local, self._turn, self._turns

    def of(self, index: Tensor) -> Tensor:
        """The member's number of the expert of each pair [rows, k]; -1 of a pair that it does not compute."""
        if self._local.device != index.device:
            self._local, self._turn, self._turns = (table.to(index.device) for table in self._tables)
        index = index.long().clamp(-1, self._count)
        local = self._local[index]
        if self._shared:
            rows = torch.arange(len(index), device=index.device)[:, None]
            local = local.where(rows % self._turns[index].clamp(1) == self._turn[index], -1)
        return local


@breaks_graphs
def _term(
    forward: Callable[..., Tensor],
    held: HeldExperts,
    rows: Tensor,
    index: Tensor,
    weights: Tensor,
    **others: Any,
) -> Tensor:
    local = held.of(index)
    row, slot = (local >= 0).nonzero(as_tuple=True)
    pairs, pair_weights = rows[row], weights[row, slot][:, None]
    if len(row):
        pairs = forward(pairs, local[row, slot][:, None].to(index.dtype), pair_weights, **others)
    else:
        # The term keeps its place in the backward pass, in which the members' all-reduces have one order.
        pairs = pairs * pair_weights
    return torch.zeros_like(rows).index_add(0, row, pairs.to(rows.dtype))
