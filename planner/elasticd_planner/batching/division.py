"""A step's sequences divided over the lanes of a pipeline: pieces in columns, and what they take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elasticd_planner.batching import fold
from elasticd_planner.batching.lane_tree import NORMAL, LaneTree
from elasticd_planner.numeric import Ints
from elasticd_planner.value import Value, refuse


class SplitCost(Value, frozen=True, kw_only=True):
    """What a division is made for, in units of one token's attention to one other."""

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
    first = np.flatnonzero(np.r_[True, sequence[1:] != sequence[:-1]])
    last = np.r_[first[1:], len(sequence)] - 1
    joined = np.zeros(rows * count + 1, dtype=np.int64)  # with the lane before in the tree
    np.add.at(joined, cell[first] + 1, 1)
    np.add.at(joined, cell[last] + 1, -1)
    apart = (np.cumsum(joined[:-1]) == 0).reshape(rows, count)
    end = np.zeros(count, dtype=np.int64)
    for each, alone in zip(by_row, apart, strict=True):
        begin = np.flatnonzero(alone)
        width = np.diff(np.r_[begin, count])
        end = np.repeat(np.maximum.reduceat(end, begin) + np.maximum.reduceat(each, begin), width)
    return int(end.max())
