"""Every order of stages at once, where memory binds: the most layers of each pipeline under each cap.

A pipeline is a vector v of counts by type of group, as in `pipeline_candidates`. Its stages are placed from the
last to the
first: with room r_j(p) for a stage of type j with p stages behind it (the lesser of what the cap allows and
what memory holds there),

    g[v] = max over types j of g[v - e_j] + r_j(|v| - 1)

so that no order is left out. Of equal orders the one that has the slower groups first is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elasticd_planner.grouping.group_types import NEVER, Column, Rules
from elasticd_planner.numeric import EQUAL, Floats, Ints

Small = npt.NDArray[np.int32]
Which = npt.NDArray[np.int8]

#: Caps looked at, and their range: parts of what pipelines of equal pace would have.
MOST_CAPS, LEAST, LARGEST = 72, 0.6, 2.2


def caps_of(columns: Sequence[Column], counts: Sequence[int], rules: Rules, pipelines: int) -> Floats:
    """Seconds of the slowest stage that pipelines of these groups may come to: where a stage gains a layer."""
    pace = sum(count / column.block for column, count in zip(columns, counts, strict=True))
    typical = pipelines * rules.layers / pace
    found: set[float] = set()
    for column in columns:
        for fixed in column.ends(rules.hop) | {rules.hop}:
            first = max(1, int(np.ceil(LEAST * typical / column.block)))
            last = min(rules.layers, int(LARGEST * typical / column.block))
            found.update(n * column.block + fixed for n in range(first, last + 1))
    listed = np.array(sorted(found))
    if len(listed) > MOST_CAPS:
        listed = listed[np.linspace(0, len(listed) - 1, MOST_CAPS).round().astype(np.int64)]
    return listed


class Ordering:
    """The best orders of all pipelines of at most `counts` groups of each column, under each of `caps`.
    `total` has the most layers, by pipeline (in the order of its counts) and cap."""

    def __init__(self, columns: Sequence[Column], counts: Sequence[int], rules: Rules, caps: Floats) -> None:
        self.columns, self.rules, self.caps = tuple(columns), rules, caps
        dims = tuple(count + 1 for count in counts)
        self.grid: Ints = np.indices(dims).reshape(len(dims), -1)
        self.depth: Ints = self.grid.sum(axis=0)
        self.strides = np.array([np.prod(dims[at + 1 :]) for at in range(len(dims))], dtype=np.int64)
        deepest = min(int(self.depth.max(initial=0)), rules.layers, rules.each if rules.deep else rules.layers)
        shape = (self.grid.shape[1], len(caps))
        self.total: Small = np.full(shape, NEVER, dtype=np.int32)
        #: The type of the first stage, of those in front of whom others stand and of whole pipelines.
        self._chosen: Which = np.full(shape, -1, dtype=np.int8)
        self._first: Which = np.full(shape, -1, dtype=np.int8)
        self._inner, self._front = (self._rooms(deepest, first=first) for first in (False, True))
        before: Small = np.full(shape, NEVER, dtype=np.int32)
        before[0] = 0
        for behind in range(deepest):
            rows = np.flatnonzero(self.depth == behind + 1)
            self.total[rows], self._first[rows] = self._placed(rows, before, self._front[behind])
            before[rows], self._chosen[rows] = self._placed(rows, before, self._inner[behind])

    def _rooms(self, deepest: int, *, first: bool) -> Small:
        """Layers of a stage by stages behind it, column and cap; NEVER where it has none."""
        found = np.zeros((deepest, len(self.columns), len(self.caps)), dtype=np.int32)
        for index, column in enumerate(self.columns):
            most = column.most_first if first else column.most
            held = np.array([most[min(behind, len(most) - 1)] for behind in range(deepest)])
            fixed = np.full(deepest, (column.embed if first else 0.0) + self.rules.hop)
            fixed[:1] += column.head - self.rules.hop
            room = np.floor((self.caps - fixed[:, None]) / column.block * (1 + EQUAL))
            found[:, index] = np.minimum(room, np.minimum(held, self.rules.layers)[:, None])
        found[found < 1] = NEVER
        return found

    def _placed(self, rows: Ints, before: Small, rooms: Small) -> tuple[Small, Which]:
        """One more stage in front of those of `before`: layers, and its type."""
        best: Small = np.full((len(rows), len(self.caps)), 0, dtype=np.int32)
        which: Which = np.full(best.shape, -1, dtype=np.int8)
        for index in sorted(range(len(self.columns)), key=lambda i: -self.columns[i].block):
            have = np.flatnonzero(self.grid[index, rows] > 0)
            value = before[rows[have] - self.strides[index]] + rooms[index]
            better = value > best[have]
            best[have] = np.where(better, value, best[have])
            which[have] = np.where(better, np.int8(index), which[have])
        return np.where(best > 0, best, NEVER).astype(np.int32), which

    def order(self, row: int, cap: int) -> tuple[int, ...]:
        """Columns of the stages from the first to the last, of one pipeline under one cap."""
        index = int(self._first[row, cap])
        found = [index]
        row -= int(self.strides[index])
        while row:
            index = int(self._chosen[row, cap])
            found.append(index)
            row -= int(self.strides[index])
        return tuple(found)

    def sums(self, rows: Ints, caps: Ints) -> Floats:
        """The seconds of one micro-batch through pipelines under caps (both by number, pairwise), the cheapest
        stages filled first. Each must hold all layers."""
        rules = self.rules
        room = np.zeros((len(self.columns), len(rows)), dtype=np.int64)
        block, embed, head = (
            np.array([getattr(column, name) for column in self.columns]) for name in ("block", "embed", "head")
        )
        at = rows.copy()
        pairs = np.arange(len(rows))
        sums = rules.hop * (self.depth[rows] - 1).astype(np.float64)
        first = True
        while len(pairs):
            chosen = (self._first if first else self._chosen)[at[pairs], caps[pairs]].astype(np.int64)
            behind = self.depth[at[pairs]] - 1
            table = self._front if first else self._inner
            room[chosen, pairs] += table[behind, chosen, caps[pairs]]
            sums[pairs] += np.where(behind == 0, head[chosen], 0.0) + (embed[chosen] if first else 0.0)
            at[pairs] -= self.strides[chosen]
            pairs = pairs[at[pairs] > 0]
            first = False
        left = rules.layers - self.depth[rows]
        for index in np.argsort(block, kind="stable"):
            base = self.grid[index, rows]
            more = np.minimum(np.maximum(room[index] - base, 0), left)
            left = left - more
            sums += (more + base) * block[index]
        return sums
