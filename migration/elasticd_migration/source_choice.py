"""The choice of senders: for every lacking part the holders to fetch it from, so that no link is busier than
need be.

A want (a destination, bytes, who holds them) is served by holders of the destination's own node where there are
any, else by all its holders. Wants with the same candidates are one class; `balance` says how many bytes of
a class each candidate gives. Then each want of a class goes to the candidate that has most of its part left,
and is divided only where that is too little. Pure, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heapreplace
from typing import NamedTuple

from elasticd_planner.spec.cluster import node_of

from elasticd_migration.flow_balance import Class, balance

#: Bytes below which a want is not divided, and that a part of one has at least.
WHOLE_BELOW_BYTES = 64 * 1024


class Share(NamedTuple):
    """The part of a want that one holder sends: `size` bytes, behind those of the shares before it."""

    source: str
    size: int


class SourceChooser:
    """Chooses who sends each want: first every class is found and every want's size is added to its class, then
    `balance`, then the wants are dealt with in their order. Wants below `whole_below` bytes have one share."""

    def __init__(self, whole_below: int = WHOLE_BELOW_BYTES) -> None:
        self._whole_below = whole_below
        self._classes: list[Class] = []
        self._index: dict[tuple[bool, tuple[str, ...]], int] = {}
        self._known: dict[tuple[tuple[str, ...], str], int] = {}
        self._cursors: list[_Cursor] = []

    def class_of(self, destination: str, holders: tuple[str, ...]) -> int:
        """The class of a want. Raises ValueError where nobody holds it."""
        home = node_of(destination)
        index = self._known.get((holders, home))
        if index is None:
            if not holders:
                raise ValueError(f"nobody holds what {destination} lacks")
            near = tuple(device for device in holders if node_of(device) == home)
            candidates = near or holders
            index = self._index.setdefault((bool(near), candidates), len(self._classes))
            if index == len(self._classes):
                nodes = tuple(node_of(device) for device in candidates)
                self._classes.append(Class(candidates=candidates, nodes=nodes, local=bool(near)))
            self._known[holders, home] = index
        return index

    def add(self, index: int, size: int) -> None:
        """So many bytes more are wanted of this class."""
        self._classes[index].size += size

    def balance(self) -> None:
        """All wants are known."""
        parts = balance(self._classes)
        self._cursors = [_Cursor(c.candidates, p) for c, p in zip(self._classes, parts, strict=True)]

    def source(self, index: int, size: int) -> str | None:
        """The sender of the next want of this class, where that is one holder; None where it is divided: ask
        for its `shares` then."""
        return self._cursors[index].one(size, self._whole_below)

    def shares(self, index: int, size: int) -> tuple[Share, ...]:
        """The next want of this class."""
        return self._cursors[index].take(size, self._whole_below)


class _Cursor:
    """Goes along the wants of a class and gives each to the candidate that has the largest fraction of its part
    left, so that all are at work from the first want to the last. What one gives too much, by a want that is
    not divided, others give less."""

    def __init__(self, candidates: Sequence[str], parts: Sequence[int]) -> None:
        #: (- fraction left, order, part left)
        self._heap = [(-1.0, order, part) for order, part in enumerate(parts) if part] or [(-1.0, 0, 0)]
        self._candidates, self._parts = candidates, parts

    def one(self, size: int, whole_below: int) -> str | None:
        """The candidate that gives all of the next want, or None where it is divided."""
        _, order, left = self._heap[0]
        least = max(1, whole_below // 2)
        if size - left >= least and size >= whole_below and len(self._heap) > 1:
            return None
        left -= size  # below nothing: it waits behind all others, for wants that exceed all parts together
        heapreplace(self._heap, (-left / max(1, self._parts[order]), order, left))
        return self._candidates[order]

    def take(self, size: int, whole_below: int) -> tuple[Share, ...]:
        shares: list[Share] = []
        while (last := self.one(size, whole_below)) is None:
            _, order, left = heappop(self._heap)
            if left >= max(1, whole_below // 2):
                shares.append(Share(self._candidates[order], left))
                size -= left
        return (*shares, Share(last, size))
