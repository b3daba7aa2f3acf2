"""Experts of one member of a TP group: the part of a module's output that its own experts compute.

All members have all rows and the router's choice. A member expands the rows to pairs of a row and one of its
experts, calls the module with these, each with one expert, and adds the outputs up by row. So the module needs
no mark for experts of others, and computes no row in vain. Of an expert that several members have each takes
its part of the rows (`expert_holders`). How many pairs there are is known in the pass alone, so that
torch.compile calls the module as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elasticd.runtime.model.graph_breaks import breaks_graphs
from elasticd.runtime.parallel.expert_holders import ExpertHolders
from elasticd.runtime.parallel.expert_pairs import Pairs


def held_experts(
    forward: Callable[..., Tensor],
    holders: ExpertHolders,
    rank: int,
    note: Callable[[Pairs], None] = lambda pairs: None,
) -> Callable[..., Tensor]:
    """A forward of a module with experts, of which a member has some.

    Args:
        forward: of the module with the parameters of the member's: (rows [n, width], index [n, k],
            weights [n, k]) -> [n, width].
        holders: the members that have each expert.
        rank: of the member.
        note: called with the pairs of each pass.

    Returns:
        A forward of the same arguments, which gives the member's term of the output.
    """
    names = tuple(inspect.signature(forward).parameters)[:3]
    own = OwnExperts(holders, rank)

    def term(*args: Any, **kwargs: Any) -> Tensor:
        rows, index, weights = (*args, *(kwargs.pop(name) for name in names[len(args) :]))
        return _term(forward, own, note, rows, index, weights, **kwargs)

    return term


class OwnExperts:
    """The experts of one member, and which rows it takes of those that others have, too."""

    count: int  #: of all experts

    def __init__(self, holders: ExpertHolders, rank: int) -> None:
        """
        Args:
            holders: the members that have each expert.
            rank: of the member.
        """
        self._holders, self._rank, self.count = holders, rank, holders.count
        # Numbers that name no expert, as -1 or the count, are nobody's.
        self._local = torch.full((holders.count + 2,), -1)
        for place, expert in enumerate(holders.held[rank]):
            self._local[expert] = place

    def pairs(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs that the member computes of a pass: by pair its row, its place in the row, and the member's
        number of its expert. The host waits once."""
        holders = self._holders
        if not holders.slowdowns:
            local = self.of(index)
            row, slot = (local >= 0).nonzero(as_tuple=True)
            return row, slot, local[row, slot]
        if self._local.device != index.device:
            self._local = self._local.to(index.device)
        flat = index.long().clamp(-1, holders.count).flatten()
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(holders.count + 2).index_add_(0, flat + 1, torch.ones_like(flat)).tolist()
        runs = holders.runs(counts[1:-1], self._rank)
        own = torch.cat([order[:0], *(order[counts[0] + start : counts[0] + stop] for start, stop in runs)])
        return own // index.shape[1], own % index.shape[1], self._local[flat[own]]

    def of(self, index: Tensor) -> Tensor:
        """The member's number of the expert of each pair [rows, k]; -1 of a pair that it does not compute."""
        if self._local.device != index.device:
            self._local = self._local.to(index.device)
        index = index.long().clamp(-1, self._holders.count)
        return self._local[index].where(self._holders.of(index) == self._rank, -1)


@breaks_graphs
def _term(
    forward: Callable[..., Tensor],
    held: OwnExperts,
    note: Callable[[Pairs], None],
    rows: Tensor,
    index: Tensor,
    weights: Tensor,
    **others: Any,
) -> Tensor:
    row, slot, local = held.pairs(index)
    note(Pairs(len(row), len(index), index.shape[1], held.count))
    pairs, pair_weights = rows[row], weights[row, slot][:, None]
    if len(row):
        pairs = forward(pairs, local[:, None].to(index.dtype), pair_weights, **others)
    else:
        # The term keeps its place in the backward pass, in which the members' all-reduces have one order.
        pairs = pairs * pair_weights
    return torch.zeros_like(rows).index_add(0, row, pairs.to(rows.dtype))
