"""Who writes what of a checkpoint: each element once, by one of its holders, the work dealt out evenly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elasticd_planner.spec.box import Box, Holding, TensorLayout, cut


def writers(layouts: Iterable[TensorLayout], order: Sequence[str]) -> dict[str, dict[str, tuple[Box, ...]]]:
    """For each device of `order` (the plan's ranks) the disjoint boxes that it writes, by tensor name.

    A tensor is cut at the borders of its holders' boxes, and each piece goes to the holder that was given the
    fewest elements so far, first in rank order: so replicas share the work, and every rank comes to the same
    result by itself. Raises KeyError for a holder that `order` lacks.
    """
    rank = {device: index for index, device in enumerate(order)}
    given = dict.fromkeys(order, 0)
    result: dict[str, dict[str, tuple[Box, ...]]] = {device: {} for device in order}
    known: dict[int, list[tuple[Box, tuple[str, ...]]]] = {}  # parameters of one family share their holdings
    every = list(layouts)  # kept, so that identities are
    for layout in every:
        if id(layout.holdings) not in known:
            known[id(layout.holdings)] = _cells(layout.holdings, rank)
        for cell, holders in known[id(layout.holdings)]:
            device = min(holders, key=lambda holder: (given[holder], rank[holder]))
            given[device] += cell.size
            mine = result[device]
            mine[layout.name] = (*mine.get(layout.name, ()), cell)
    return result


def _cells(holdings: Sequence[Holding], rank: dict[str, int]) -> list[tuple[Box, tuple[str, ...]]]:
    """The pieces of a tensor that each have one set of holders, with those holders."""
    boxes = [holding.box for holding in holdings if not holding.box.empty]
    return [
        (cell, tuple(dict.fromkeys(h.device for h in holdings if h.box.contains(cell)))) for cell in cut(boxes)
    ]
