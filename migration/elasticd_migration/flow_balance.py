"""The bytes that each candidate gives, so that the busiest link has the fewest.

Theory of operation. Links are what leaves a device and what leaves a node; what comes into a node is no choice,
since every byte is received once. Bytes that stay inside a node leave a device but no node, and how many they
are is known beforehand, so this is a flow: classes of bytes, devices, nodes. The least busiest link is found by
matrix scaling with inequalities (Sinkhorn's iteration; Censor and Zenios, Parallel Optimization, 1997, chapter
9): candidates give in proportion to weights, and the weight of a link above the target shrinks until it is not.
Every set of devices gives a lower bound: what only they can give, over what they and their nodes carry. The
search ends when it is close to the best bound seen.

Every rank computes this for itself, and all must come to the same bits. So floating point is limited to what
IEEE 754 rounds alike on every machine: single additions, multiplications and divisions, and sums in a fixed
order (`bincount`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: The search ends when the busiest link is at most this fraction above the lower bound.
CLOSE = 0.03
#: Sweeps of the scaling between two looks at it, and edges swept in all: what bounds the time.
SWEEPS, MOST_SWEPT = 8, 40_000_000
#: Weights that the lower bound is tried at.
LEVELS = 48
#: Of a class, the fraction that its candidates with the smallest parts give up to the others together.
DUST = 0.01


@dataclass(kw_only=True, slots=True)
class Class:
    """`size` bytes that any of `candidates` can give; `nodes` are theirs. `local`: they stay in that node."""

    candidates: tuple[str, ...]
    nodes: tuple[str, ...]
    local: bool
    size: int = 0


def balance(classes: Sequence[Class]) -> list[list[int]]:
    """For each class the bytes that each candidate gives: whole numbers that add up to its size."""
    if all(len(each.candidates) == 1 for each in classes):
        return [[each.size] for each in classes]
    shares = _Flow(classes).search().tolist()
    parts, start = [], 0
    for each in classes:
        stop = start + len(each.candidates)
        parts.append(_whole(each.size, shares[start:stop]))
        start = stop
    return parts


def _whole(size: int, shares: Sequence[float]) -> list[int]:
    """`size` in whole bytes about as `shares`, without crumbs."""
    least = DUST * size / len(shares)
    kept = [share if share >= least else 0.0 for share in shares]
    runs = list(accumulate(kept))  # not sum(): it rounds otherwise from Python 3.12 on
    before, parts = 0, []
    for run in runs:
        border = min(size, int(size * (run / runs[-1]))) if runs[-1] else 0
        parts.append(border - before)
        before = border
    parts[max(range(len(parts)), key=lambda i: kept[i])] += size - before
    return parts


class _Flow:
    """The classes as arrays, an edge for each class and candidate."""

    def __init__(self, classes: Sequence[Class]) -> None:
        devices: dict[str, int] = {}
        nodes: dict[str, int] = {}
        home: list[int] = []
        ends: list[int] = []
        for each in classes:
            for name, node in zip(each.candidates, each.nodes, strict=True):
                index = devices.setdefault(name, len(devices))
                if index == len(home):
                    home.append(nodes.setdefault(node, len(nodes)))
                ends.append(index)
        self.devices, self.nodes = len(devices), len(nodes)
        self.home = np.array(home)
        self.sizes = np.array([float(each.size) for each in classes])
        self.widths = np.array([len(each.candidates) for each in classes])
        self.owner = np.repeat(np.arange(len(classes)), self.widths)
        self.device = np.array(ends)
        inside = np.array([each.local for each in classes])
        # What stays inside goes over no node's link: it is booked on one more node, which has no limit.
        self.node = np.where(inside[self.owner], self.nodes, self.home[self.device])
        first = np.cumsum(self.widths) - self.widths
        self.inside = _sums(self.home[self.device[first]][inside], self.sizes[inside], self.nodes)

    def search(self) -> Floats:
        """Bytes over each edge, the busiest link close to the least possible."""
        device, node = np.ones(self.devices), np.ones(self.nodes + 1)
        best = self.spread(device, node)
        most, bound = self.busiest(best), self.bound(self.out(best))
        target = bound
        for swept in range(MOST_SWEPT // (SWEEPS * len(self.device)) + 1):
            if most <= bound * (1 + CLOSE):
                break
            for _ in range(SWEEPS):
                device = _scaled(device, self.out(self.spread(device, node)), target)
                node = _scaled(node, self.over(self.spread(device, node)), target)
            flows = self.spread(device, node)
            busy = self.busiest(flows)
            if busy < most:
                most, best = busy, flows
            bound = max(bound, self.bound(1 / device), self.bound(1 / (device * node[self.home])))
            # A target below the least possible never comes to rest: it rises, slowly while that may be it.
            target = max(target * 1.005 if swept % 4 == 3 else target, bound)
            if target > most:
                break
        return best

    def spread(self, device: Floats, node: Floats) -> Floats:
        """Each class in proportion to the weights of its candidates and their nodes."""
        weight = device[self.device] * node[self.node]
        total = _sums(self.owner, weight, len(self.sizes))
        return np.asarray(weight * (self.sizes / total)[self.owner])

    def out(self, sent: Floats) -> Floats:
        """Bytes out of each device."""
        return _sums(self.device, sent, self.devices)

    def over(self, sent: Floats) -> Floats:
        """Bytes out of each node; nothing over the one that stands for inside."""
        loads = _sums(self.node, sent, self.nodes + 1)
        loads[self.nodes] = 0.0
        return loads

    def busiest(self, sent: Floats) -> float:
        return float(max(self.out(sent).max(), self.over(sent).max()))

    def bound(self, pressure: Floats) -> float:
        """The best lower bound by the devices above some pressure."""
        weakest = np.full(len(self.sizes), np.inf)
        np.minimum.at(weakest, self.owner, pressure[self.device])
        best = 0.0
        for level in _levels(pressure):
            demand = float(_sums((weakest >= level).astype(np.int64), self.sizes, 2)[1])
            counts = np.bincount(self.home[pressure >= level], minlength=self.nodes)
            best = max(best, _least(demand, counts, self.inside))
        return best


def _sums(index: Ints, weights: Floats, count: int) -> Floats:
    """The sum of the weights of each index, in a fixed order."""
    return np.bincount(index, weights=weights, minlength=count).astype(np.float64)


def _scaled(weight: Floats, load: Floats, target: float) -> Floats:
    """Weights of links above the target shrunk, of links below it grown again, to 1 at most."""
    ratio = np.divide(target, load, out=np.full_like(load, 2.0), where=load > target / 2)
    return np.clip(weight * ratio, 1e-9, 1.0)


def _levels(pressure: Floats) -> Iterator[float]:
    """The values to cut at: all, or of many those below the widest gaps."""
    values = np.unique(pressure)
    if len(values) > LEVELS:
        gaps = values[1:] / np.maximum(values[:-1], 1e-300)
        widest = np.argsort(-gaps, kind="stable")[: LEVELS - 1]
        values = np.sort(np.concatenate([values[:1], values[1:][widest]]))
    yield from values.tolist()


def _least(demand: float, counts: Ints, inside: Floats) -> float:
    """The least T with which devices, `counts` of them in each node, can give `demand` out: those of one node
    at most T each, and together T to other nodes and `inside` to its own. Newton's method from below."""
    least = demand / max(float(counts.sum()), 1.0)
    while True:
        full = counts * least > least + inside
        kept = float(_sums(full.astype(np.int64), inside, 2)[1])
        count = float(counts[~full].sum() + full.sum())
        level = (demand - kept) / max(count, 1.0)
        if level <= least * (1 + 1e-12):
            return least
        least = level
