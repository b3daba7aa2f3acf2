"""A step's sequences divided over the lanes of a pipeline: pieces in columns, and what they take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elasticd_planner.batching import fold
from elasticd_planner.batching.lane_tree import NORMAL, LaneTree
from elasticd_planner.numeric import Ints
from elasticd_planner.value import Value, refuse


class SplitCost(Value, frozen=True, kw_only=True):
    """The costs that a division is made for, in units of one token's attention to one other."""

    linear: int  # a token's matrix products
    fixed: int = 0  # a row, whatever is in it
    least: int = 256  # [pairs] of a piece: shorter ones waste a kernel, so that only memory asks for them

    def __post_init__(self) -> None:
        if self.linear < 1 or self.fixed < 0 or self.least < 1:
            refuse("division: linear and the least piece must be at least 1, and fixed not negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceDivision:
    """Pieces in columns: pairs [start, stop) of a sequence, in a row of a lane. Those of one sequence follow
    each other, from the first of their lanes in the tree to the last."""

    sequence: Ints  # its place among the step's lengths
    place: Ints  # of the lane in the tree's order
    row: Ints
    start: Ints
    stop: Ints

    def tokens(self, lengths: Ints) -> Ints:
        """Of each piece."""
        return fold.token_counts(lengths[self.sequence], self.start, self.stop)


def bound(lengths: Ints, tree: LaneTree, cost: SplitCost) -> int:
    """A time that no division undercuts: all work over all speed, and the fewest rows that memory allows."""
    rows = -(-int(lengths.sum()) // sum(tree.capacity))
    speed = sum(2**40 // each for each in tree.slowdown)
    return int((lengths * (cost.linear + lengths)).sum()) * 2**40 // (NORMAL * speed) + rows * cost.fixed


def _sharing(sequence: Ints, cell: Ints, cells: int) -> Ints:
    """Of each cell (a lane in a row) the first of those that share a sequence with it, directly or through
    others: itself where none do. Pieces of a sequence follow each other."""
    first = np.flatnonzero(np.r_[True, sequence[1:] != sequence[:-1]])
    width = np.diff(np.r_[first, len(sequence)])
    shared = cell[np.repeat(width > 1, width)]
    width = width[width > 1]
    found = np.arange(cells)
    if not len(shared):
        return found
    begin = np.cumsum(width) - width
    while True:
        least = np.repeat(np.minimum.reduceat(found[shared], begin), width)
        if (found[shared] == least).all():
            return found
        np.minimum.at(found, shared, least)


def seconds(division: SequenceDivision, lengths: Ints, tree: LaneTree, cost: SplitCost) -> int:
    """When the last lane ends, in units of one token's attention to one other on a normal lane: lanes that
    share a sequence begin its row together and go through it with the slowest of them. Exchanges are not
    counted."""
    sequence, place, row = division.sequence, division.place, division.row
    rows, count = int(row.max()) + 1, len(tree)
    work = np.zeros(rows * count, dtype=np.int64)
    products = division.tokens(lengths) * (cost.linear + lengths[sequence])
    cell = row * count + place
    np.add.at(work, cell, products * np.array(tree.slowdown)[place])
    by_row = (work // NORMAL + (work > 0) * cost.fixed).reshape(rows, count)
    groups = _sharing(sequence, cell, rows * count).reshape(rows, count) % count
    end = np.zeros(count, dtype=np.int64)
    for each, group in zip(by_row, groups, strict=True):
        begin, longest = np.zeros_like(end), np.zeros_like(end)
        np.maximum.at(begin, group, end)
        np.maximum.at(longest, group, each)
        end = (begin + longest)[group]
    return int(end.max())
