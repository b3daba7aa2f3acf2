"""Experts of one member of a TP group: the part of a module's output that its own experts compute.

All members have all rows and the router's choice. A member expands the rows to pairs of a row and one of its
experts, calls the module with these, each with one expert, and adds the outputs up by row. So the module needs
no mark for experts of others, and computes no row in vain. How many pairs there are is known in the pass alone,
so that torch.compile calls the module as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elasticd.runtime.model.graph_breaks import breaks_graphs


def held_experts(forward: Callable[..., Tensor], held: range) -> Callable[..., Tensor]:
    """A forward of a module with experts, of which a member has some.

    Args:
        forward: of the module with the parameters of these: (rows [n, width], index [n, k], weights [n, k])
            -> [n, width].
        held: their numbers among all experts.

    Returns:
        A forward of the same arguments, which gives the member's term of the output.
    """
    names = tuple(inspect.signature(forward).parameters)[:3]

    def term(*args: Any, **kwargs: Any) -> Tensor:
        rows, index, weights = (*args, *(kwargs.pop(name) for name in names[len(args) :]))
        return _term(forward, held, rows, index, weights, **kwargs)

    return term


@breaks_graphs
def _term(
    forward: Callable[..., Tensor], held: range, rows: Tensor, index: Tensor, weights: Tensor, **others: Any
) -> Tensor:
    row, slot = ((index >= held.start) & (index < held.stop)).nonzero(as_tuple=True)
    pairs, pair_weights = rows[row], weights[row, slot][:, None]
    if len(row):
        pairs = forward(pairs, (index[row, slot] - held.start)[:, None], pair_weights, **others)
    else:
        # The term keeps its place in the backward pass, in which the members' all-reduces have one order.
        pairs = pairs * pair_weights
    return torch.zeros_like(rows).index_add(0, row, pairs.to(rows.dtype))
