"""Box arithmetic: half-open hyper-rectangles of global tensors, who holds them, and who lacks what.

A layout is a set of holdings. Everything that elasticd derives (migration, gradient reduction, stage
boundaries) comes from overlap, difference and cutting of boxes, which are all here and pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import eq, ge, gt, le, sub

from elasticd_planner.value import Value, refuse


class Box(Value, frozen=True, kw_only=True, order=True, gc=False):
    """Indices start <= i < stop in each dimension of a global tensor. A scalar's box has no dimensions."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            refuse(f"box: start {self.start} and stop {self.stop} differ in their number of dimensions")
        if min(self.start, default=0) < 0 or any(map(gt, self.start, self.stop)):
            refuse(f"box: start {self.start} must be between 0 and stop {self.stop} in each dimension")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor of this shape."""
        return cls(start=(0,) * len(shape), stop=tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(map(sub, self.stop, self.start))

    @property
    def empty(self) -> bool:
        """True if it has no element."""
        return any(map(eq, self.start, self.stop))

    def overlap(self, other: Box) -> Box | None:
        """The common part, or None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(ge, start, stop)):
            return None
        return Box(start=start, stop=stop)

    def contains(self, other: Box) -> bool:
        """Returns True if `other` lies within this box; one with another number of dimensions does not."""
        return (
            len(self.start) == len(other.start)
            and all(map(le, self.start, other.start))
            and all(map(ge, self.stop, other.stop))
        )

    def minus(self, other: Box) -> tuple[Box, ...]:
        """This box without `other`, as disjoint boxes."""
        common = self.overlap(other)
        if common is None:
            return () if self.empty else (self,)
        rest: list[Box] = []
        for dim in range(len(self.start)):
            for a, b in ((self.start[dim], common.start[dim]), (common.stop[dim], self.stop[dim])):
                if a < b:
                    start = (*common.start[:dim], a, *self.start[dim + 1 :])
                    rest.append(Box(start=start, stop=(*common.stop[:dim], b, *self.stop[dim + 1 :])))
        return tuple(rest)

    def cropped(self, dim: int, start: int, stop: int) -> Box:
        """This box with the indices start <= i < stop in one dimension."""
        return Box(
            start=(*self.start[:dim], start, *self.start[dim + 1 :]),
            stop=(*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def slices(self, within: Box) -> tuple[slice, ...]:
        """The slices at which this box lies in an array that holds the box `within`."""
        return tuple(
            slice(a - origin, b - origin)
            for a, b, origin in zip(self.start, self.stop, within.start, strict=True)
        )


def subtract(box: Box, others: Iterable[Box]) -> tuple[Box, ...]:
    """`box` without all of `others`, as disjoint boxes."""
    rest: tuple[Box, ...] = (box,)
    for other in others:
        rest = tuple(piece for part in rest for piece in part.minus(other))
    return rest


def cut(boxes: Iterable[Box]) -> Iterator[Box]:
    """The cells of the grid that all borders of `boxes` draw, of which at least one box covers each.

    Every box is a disjoint union of cells, and no border of a box runs through a cell.
    """
    for cell, _ in covered(boxes):
        yield cell


#: Starts and stops in the first dimensions, and the boxes around.
_Slab = tuple[tuple[int, ...], tuple[int, ...], Sequence[Box]]


def covered(boxes: Iterable[Box], mine: Collection[Box] | None = None) -> Iterator[tuple[Box, Sequence[Box]]]:
    """The cells of `cut`, each with the boxes that contain it. With `mine`, which are some of the boxes, the
    cells of these alone, cut by all borders nevertheless."""
    distinct = sorted({box for box in boxes if not box.empty})
    wanted = {box for box in (distinct if mine is None else mine) if not box.empty}
    if not wanted:
        return
    slabs: list[_Slab] = [((), (), distinct)]
    for dim in range(len(distinct[0].start)):
        edges = sorted({edge for box in distinct for edge in (box.start[dim], box.stop[dim])})
        index = {edge: i for i, edge in enumerate(edges)}
        first = min(index[box.start[dim]] for box in wanted)
        last = max(index[box.stop[dim]] for box in wanted)
        cut_again: list[_Slab] = []
        for starts, stops, around in slabs:
            inside: list[list[Box]] = [[] for _ in range(first, last)]
            for box in around:
                for i in range(max(first, index[box.start[dim]]), min(last, index[box.stop[dim]])):
                    inside[i - first].append(box)
            for (start, stop), held in zip(pairwise(edges[first : last + 1]), inside, strict=True):
                if not wanted.isdisjoint(held):
                    cut_again.append(((*starts, start), (*stops, stop), held))
        slabs = cut_again
    for starts, stops, around in slabs:
        yield Box(start=starts, stop=stops), around


class Holding(Value, frozen=True, kw_only=True, gc=False):
    """One device's box of a tensor.

    `partial` is None where the box holds the value itself. Otherwise the value is a sum, this box holds one
    term of it, and `partial` names the term: boxes with the same name hold the same term (count it once).
    """

    device: str
    box: Box
    partial: str | None = None


def cells(holdings: Iterable[Holding], within: Box | None = None) -> Iterator[tuple[Box, tuple[Holding, ...]]]:
    """Cuts a tensor, as far as it is held, into cells that each have one set of holders.

    Args:
        holdings: who holds which box of the tensor.
        within: the box of the tensor that is cut (None: all of it).

    Yields:
        Each cell, none of them empty, with the holdings that contain it, in the order of `holdings`.
    """
    held = tuple(holdings)
    by_box: dict[Box, list[int]] = defaultdict(list)  # replicas hold the same boxes
    for index, holding in enumerate(held):
        box = holding.box if within is None else within.overlap(holding.box)
        if box is not None:
            by_box[box].append(index)
    for cell, around in covered(by_box):
        yield cell, tuple(held[index] for index in sorted(index for box in around for index in by_box[box]))


class TensorLayout(Value, frozen=True, kw_only=True):
    """Which device holds which box of one global tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    holdings: tuple[Holding, ...]

    def __post_init__(self) -> None:
        whole = Box.whole(self.shape)
        outside = {box for box in {holding.box for holding in self.holdings} if not whole.contains(box)}
        for holding in self.holdings if outside else ():
            if holding.box in outside:
                refuse(f"{self.name}: {holding.device} holds {holding.box}, outside of shape {self.shape}")

    def of(self, device: str) -> tuple[Box, ...]:
        """The boxes that one device holds."""
        return tuple(holding.box for holding in self.holdings if holding.device == device)


def lacking(old: TensorLayout | None, new: TensorLayout) -> dict[str, tuple[Box, ...]]:
    """For each device of `new`, the boxes that it is to hold and does not hold in `old`, disjoint."""
    lacks: dict[str, tuple[Box, ...]] = {}
    for device in dict.fromkeys(holding.device for holding in new.holdings):
        held = old.of(device) if old is not None else ()
        rest: list[Box] = []
        for box in new.of(device):
            rest.extend(subtract(box, (*held, *rest)))
        if rest:
            lacks[device] = tuple(rest)
    return lacks
