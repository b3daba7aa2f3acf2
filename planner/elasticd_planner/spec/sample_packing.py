"""Samples of unequal length dealt to a step's micro-batches: as even as padding lets them be.

A sequence of L tokens costs linear x L + L^2: matrix products go with tokens, attention with their square. A
micro-batch of n is padded to its longest, so it costs n x (linear x L + L^2) of that one. Samples are sorted by
length and cut into runs, since of all micro-batches with a given longest sample that of its neighbours pads
least. The largest cost is the least possible for such runs (bisection over it; each run takes as many as fit).
Integers throughout, so that every rank cuts alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import prod

from elasticd_planner.spec.model import ModelSpec


def linear_of(spec: ModelSpec) -> int:
    """The cost of a token's matrix products in a mean block, in units of its attention to one other token:
    elements of the block's matrices over the model's width (six operations of each, as in `model_profile`)."""
    elements = sum(
        prod(parameter.shape)
        for layer in spec.layers
        for parameter in spec.kinds[layer]
        if parameter.kind != "buffer" and len(parameter.shape) > 1
    )
    return max(1, round(elements / len(spec.layers) / max(1, spec.width)))


def cost(samples: int, longest: int, linear: int) -> int:
    """Of a micro-batch, in units of one token's attention to one other."""
    return samples * longest * (linear + longest)


def runs(lengths: Sequence[int], count: int, most: int, linear: int) -> tuple[tuple[int, ...], ...]:
    """Cuts the samples, of these lengths, into `count` micro-batches of positions, the longest sample first.

    None has more tokens, padding included, than `most` samples of the greatest length. Needs at least `count`
    samples, and no more than `count` x `most`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    descending = [max(1, lengths[i]) for i in order]
    room = most * descending[0]
    low, high = cost(1, descending[0], linear), cost(most, descending[0], linear)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(descending, middle, room, linear)) <= count:
            high = middle
        else:
            low = middle + 1
    sizes = _split(_cut(descending, low, room, linear), descending, count, linear)
    found, first = [], 0
    for size in sizes:
        found.append(tuple(order[first : first + size]))
        first += size
    return tuple(found)


def _cut(descending: Sequence[int], most: int, room: int, linear: int) -> list[int]:
    """The sizes of runs of which each takes as many samples as cost and tokens allow."""
    sizes, first = [], 0
    while first < len(descending):
        longest = descending[first]
        fits = max(1, min(most // cost(1, longest, linear), room // longest))
        sizes.append(min(fits, len(descending) - first))
        first += sizes[-1]
    return sizes


def _split(sizes: list[int], descending: Sequence[int], count: int, linear: int) -> list[int]:
    """Halves the costliest runs until there are `count`."""
    runs = [(first, size) for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]
    done = [(first, size) for first, size in runs if size == 1]
    costly = [(-cost(size, descending[first], linear), first, size) for first, size in runs if size > 1]
    heapify(costly)
    while len(costly) + len(done) < count:
        _, start, whole = heappop(costly)
        half = whole // 2
        for first, size in ((start, whole - half), (start + whole - half, half)):
            if size > 1:
                heappush(costly, (-cost(size, descending[first], linear), first, size))
            else:
                done.append((first, size))
    return [size for _, size in sorted(done + [(first, size) for _, first, size in costly])]


def dealt(costs: Sequence[int], slots: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Deals micro-batches of these costs, by index, to pipelines that take `slots` of them each: the costliest
    first, to the pipeline that then has the least for each of its slots."""
    taken: list[list[int]] = [[] for _ in slots]
    load = [0] * len(slots)
    common = prod(set(slots))  # a multiple of each, so that load / slots is compared exactly
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        open_ = [p for p, slot in enumerate(slots) if len(taken[p]) < slot]
        after = [(load[p] + costs[index]) * common // slot for p, slot in enumerate(slots)]
        best = min(open_, key=after.__getitem__)
        taken[best].append(index)
        load[best] += costs[index]
    return tuple(map(tuple, taken))
