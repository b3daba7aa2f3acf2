"""Who sends what: for all that is lacking the holders to fetch it from, so that no link is busier than need be.

A want (a destination, bytes, who holds them) is served by holders of the destination's own node where there are
any, else by all its holders. Wants with the same candidates are one class; `balance` says how many bytes of
a class each candidate gives. Then each want of a class goes to the candidate that has most of its part left,
and is divided only where that is too little. Pure, and the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heapreplace
from typing import NamedTuple

from elasticd_migration.balance import Class, balance

#: Bytes below which a want is not divided, and that a part of one has at least.
WHOLE_BELOW = 64 * 1024


class Want(NamedTuple):
    """`size` bytes that `destination` lacks and that each of `holders` has, in an order that is the same on
    every rank; the destination is not one of them."""

    destination: str
    size: int
    holders: tuple[str, ...]


class Share(NamedTuple):
    """What one holder sends of a want: `size` bytes, behind those of the shares before it."""

    source: str
    size: int


class Loads(NamedTuple):
    """Bytes over each link."""

    out_of_device: dict[str, int]
    out_of_node: dict[str, int]
    into_node: dict[str, int]

    @property
    def busiest(self) -> int:
        return max((most for link in self for most in link.values()), default=0)


def choose(wants: Sequence[Want], *, whole_below: int = WHOLE_BELOW) -> list[tuple[Share, ...]]:
    """The shares of each want; they add up to its size. Wants below `whole_below` bytes have one share.

    Raises ValueError for a want that nobody holds."""
    table = _Table()
    member = [table.add(want) for want in wants]
    cursors = [
        _Cursor(each.candidates, part) for each, part in zip(table.classes, balance(table.classes), strict=True)
    ]
    return [cursors[index].take(want.size, whole_below) for want, index in zip(wants, member, strict=True)]


def loads(wants: Sequence[Want], chosen: Sequence[Sequence[Share]]) -> Loads:
    """What a choice puts on each link."""
    found = Loads(defaultdict(int), defaultdict(int), defaultdict(int))
    for want, shares in zip(wants, chosen, strict=True):
        home = node_of(want.destination)
        for share in shares:
            found.out_of_device[share.source] += share.size
            node = node_of(share.source)
            if node != home:
                found.out_of_node[node] += share.size
                found.into_node[home] += share.size
    return found


def node_of(device: str) -> str:
    return device.rpartition("/")[0]


@dataclass(slots=True)
class _Table:
    """The classes of the wants so far."""

    classes: list[Class] = field(default_factory=list)
    _index: dict[tuple[bool, tuple[str, ...]], int] = field(default_factory=dict)
    _known: dict[tuple[tuple[str, ...], str], int] = field(default_factory=dict)

    def add(self, want: Want) -> int:
        """The class of a want, which it makes larger."""
        key = want.holders, node_of(want.destination)
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = self._find(want, key[1])
        self.classes[index].size += want.size
        return index

    def _find(self, want: Want, home: str) -> int:
        if not want.holders:
            raise ValueError(f"nobody holds what {want.destination} lacks")
        near = tuple(device for device in want.holders if node_of(device) == home)
        candidates = near or want.holders
        index = self._index.setdefault((bool(near), candidates), len(self.classes))
        if index == len(self.classes):
            nodes = tuple(node_of(device) for device in candidates)
            self.classes.append(Class(candidates=candidates, nodes=nodes, local=bool(near)))
        return index


class _Cursor:
    """Goes along the wants of a class and gives each to the candidate that has the largest fraction of its part
    left, so that all are at work from the first want to the last. What one gives too much, by a want that is
    not divided, others give less."""

    def __init__(self, candidates: Sequence[str], parts: Sequence[int]) -> None:
        #: (- fraction left, order, part left)
        self._heap = [(-1.0, order, part) for order, part in enumerate(parts) if part] or [(-1.0, 0, 0)]
        self._candidates, self._parts = candidates, parts

    def take(self, size: int, whole_below: int) -> tuple[Share, ...]:
        heap = self._heap
        shares: list[Share] = []
        while True:
            _, order, left = heap[0]
            if len(heap) == 1 or size < whole_below or size - left < max(1, whole_below // 2):
                self._use(order, left - size)
                return (*shares, Share(self._candidates[order], size))
            if left >= max(1, whole_below // 2):
                shares.append(Share(self._candidates[order], left))
                size -= left
            heappop(heap)

    def _use(self, order: int, left: int) -> None:
        """A candidate with nothing left waits behind all others, for wants that exceed all parts together."""
        heapreplace(self._heap, (-left / max(1, self._parts[order]), order, left))
