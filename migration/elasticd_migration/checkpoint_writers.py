"""The writers of a checkpoint's parts: each element once, by one of its holders, the work dealt out evenly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elasticd_planner.spec.box import Box, TensorLayout, cells


def writers(layouts: Iterable[TensorLayout], order: Sequence[str]) -> dict[str, dict[str, tuple[Box, ...]]]:
    """For each device of `order` (the plan's ranks) the disjoint boxes that it writes, by tensor name.

    A tensor is cut at the borders of its holders' boxes, and each piece goes to the holder that was given the
    fewest elements so far, first in rank order: so replicas share the work, and every rank comes to the same
    result by itself. Raises KeyError for a holder that `order` lacks.
    """
    rank = {device: index for index, device in enumerate(order)}
    elements = dict.fromkeys(order, 0)
    result: dict[str, dict[str, tuple[Box, ...]]] = {device: {} for device in order}
    known: dict[int, list[tuple[Box, set[str]]]] = {}  # parameters of one family share their holdings
    every = list(layouts)  # kept, so that identities are
    for layout in every:
        if id(layout.holdings) not in known:
            known[id(layout.holdings)] = [
                (cell, {holding.device for holding in held}) for cell, held in cells(layout.holdings)
            ]
        for cell, holders in known[id(layout.holdings)]:
            device = min(holders, key=lambda holder: (elements[holder], rank[holder]))
            elements[device] += cell.size
            parts = result[device]
            parts[layout.name] = (*parts.get(layout.name, ()), cell)
    return result
