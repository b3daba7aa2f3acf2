"""Other planners of packed sequences over lanes, in the units of `packed_rows`: DHP, FlexSP, static degrees.

They are written from what is published of them, and given what is best for them: DHP's second stage is exact,
no planner's own time is counted, and their rings hide as much of the exchange as ours. None of them knows slow
lanes.

  waves   DHP (arXiv 2602.21788: best-fit decreasing into groups of as many ranks as memory asks, then degrees
          by min max time under one budget of ranks, any integer) and FlexSP (ASPLOS'25: degrees that are powers
          of two, sequences by length). Groups run side by side, one wave after the other, and each wave ends
          with its slowest group.
  static  One degree for all, a power of two, the best of those that hold the longest sequence. Sequences are
          packed in the order of the batch and dealt to the groups in turn, as Megatron-LM does; or, told as
          well, dealt by cost. Groups meet at the end of the step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from elasticd_planner.numeric import Floats
from elasticd_planner.numeric import Ints as Lengths

from elasticd.simulator.devices.packed_rows import Gang

#: Seconds of a step of these lengths, in the units of the lanes.
Planner = Callable[[Lengths, Gang], float]

#: Waves are filled to so much of the memory, so that the groups' roundings find room.
FILL = 0.9


def dhp(lengths: Lengths, gang: Gang) -> float:
    """Seconds of a step by DHP."""
    return _waves(lengths, gang, twos=False, by_length=False)


def dhp_by_length(lengths: Lengths, gang: Gang) -> float:
    """DHP with sequences of like lengths in one wave, which it does not do."""
    return _waves(lengths, gang, twos=False, by_length=True)


def flexsp(lengths: Lengths, gang: Gang) -> float:
    """Seconds of a step by FlexSP."""
    return _waves(lengths, gang, twos=True, by_length=True)


def static_in_order(lengths: Lengths, gang: Gang) -> float:
    """Seconds of a step by the best static degree, packs in the order of the batch."""
    return min(_static(lengths, gang, degree, by_cost=False) for degree in _degrees(lengths, gang))


def static_by_cost(lengths: Lengths, gang: Gang) -> float:
    """Seconds of a step by the best static degree, sequences dealt by cost."""
    return min(_static(lengths, gang, degree, by_cost=True) for degree in _degrees(lengths, gang))


def without_stragglers(planner: Callable[[Lengths, Gang], float]) -> Callable[[Lengths, Gang], float]:
    """The same on the lanes that are not slow."""

    def planned(lengths: Lengths, gang: Gang) -> float:
        return planner(lengths, gang._replace(slowdown=tuple(each for each in gang.slowdown if each <= 64)))

    return planned


Bin = tuple[int, list[int]]  # ranks that it needs, sequences


def _bins(numbers: Iterable[int], lengths: Lengths, capacity: int) -> list[Bin]:
    """Best-fit decreasing: into bins of as many ranks as their first sequence, the longest, needs."""
    bins: list[list[int]] = []  # ranks, tokens left
    members: list[list[int]] = []
    for number in sorted(numbers, key=lambda number: -lengths[number]):
        length = int(lengths[number])
        need = -(-length // capacity)
        fits = [at for at, (ranks, left) in enumerate(bins) if ranks >= need and left >= length]
        if fits:
            best = min(fits, key=lambda at: bins[at][1])
        else:
            best = len(bins)
            bins.append([need, need * capacity])
            members.append([])
        bins[best][1] -= length
        members[best].append(number)
    return [(ranks, own) for (ranks, _), own in zip(bins, members, strict=True)]


def degrees(times: Sequence[Floats], least: Sequence[int], ranks: int, allowed: Sequence[int]) -> list[int]:
    """Degrees of groups, of those allowed, with the least longest time under a budget of ranks: exact, by
    bisection over the values that it can take.

    times: of each group at 1, 2, ... ranks; least: the ranks that each needs.
    """
    usable = [
        [(float(time[d - 1]), d) for d in allowed if d >= need] for time, need in zip(times, least, strict=True)
    ]
    values = sorted({time for each in usable for time, _ in each})
    low, high, best = 0, len(values) - 1, list(least)
    while low <= high:
        middle = (low + high) // 2
        chosen = [min((d for t, d in each if t <= values[middle]), default=10**9) for each in usable]
        if sum(chosen) <= ranks:
            best, high = chosen, middle - 1
        else:
            low = middle + 1
    return best


def group_times(lengths: Lengths, gang: Gang) -> Floats:
    """The seconds of a group for these sequences at 1, 2, ... ranks: a ring passes all keys, and shows beyond
    the attention."""
    degree = np.arange(1, gang.lanes + 1)
    link = np.where(degree <= gang.node, gang.near, gang.far)
    exchange = (degree - 1) / degree * lengths.sum() * link * gang.linear
    attention = (lengths.astype(float) ** 2).sum() / degree
    return np.asarray(gang.cost(lengths, lengths).sum() / degree + np.maximum(0, exchange - attention))


def _waves(lengths: Lengths, gang: Gang, *, twos: bool, by_length: bool) -> float:
    ranks, slowdown = gang.lanes, np.array(gang.slowdown) / 64
    order = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(lengths))
    allowed = [d for d in range(1, ranks + 1) if not twos or d & (d - 1) == 0]
    total, first = 0.0, 0
    while first < len(order):
        ahead = np.cumsum(lengths[order[first:]])
        stop = first + max(1, int(np.searchsorted(ahead, FILL * ranks * gang.capacity, "right")))
        while True:
            bins = _bins(order[first:stop].tolist(), lengths, gang.capacity)
            bins = [(1 << (need - 1).bit_length(), own) for need, own in bins] if twos else bins
            if sum(need for need, _ in bins) <= ranks or stop - first == 1:
                break
            stop -= max(1, (stop - first) // 50)
        times = [group_times(lengths[own], gang) for _, own in bins]
        chosen = degrees(times, [need for need, _ in bins], ranks, allowed)
        at, slowest = 0, 0.0
        for time, degree in sorted(zip(times, chosen, strict=True), key=lambda each: -each[1]):
            slowest = max(slowest, float(time[degree - 1]) * slowdown[at : at + degree].max())
            at += degree
        total, first = total + slowest + gang.fixed, stop
    return total


def _degrees(lengths: Lengths, gang: Gang) -> list[int]:
    degrees = [1 << power for power in range(gang.lanes.bit_length()) if 1 << power <= gang.lanes]
    return [degree for degree in degrees if degree * gang.capacity >= int(lengths.max())]


def _static(lengths: Lengths, gang: Gang, degree: int, *, by_cost: bool) -> float:
    groups, room = gang.lanes // degree, gang.capacity * degree
    packs: list[list[list[int]]] = [[] for _ in range(groups)]  # by group
    if by_cost:
        loads, own = np.zeros(groups), [list[int]() for _ in range(groups)]
        for length in sorted(lengths.tolist(), reverse=True):
            at = int(loads.argmin())
            loads[at] += length * (gang.linear + length)
            own[at].append(length)
        for at, each in enumerate(own):
            packs[at] = _first_fit(each, room)
    else:
        bins: list[list[int]] = [[]]
        for length in lengths.tolist():
            if sum(bins[-1]) + length > room:
                bins.append([])
            bins[-1].append(length)
        for number, pack in enumerate(bins):
            packs[number % groups].append(pack)
    slowdown = np.array(gang.slowdown[: groups * degree]).reshape(groups, degree).max(1) / 64
    each = [
        sum(float(group_times(np.array(pack), gang)[degree - 1]) * slow + gang.fixed for pack in own)
        for own, slow in zip(packs, slowdown, strict=True)
    ]
    return float(max(each))


def _first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Sequences, the longest first, into as few packs as first fit needs."""
    packs: list[list[int]] = []
    for length in lengths:
        pack = next((pack for pack in packs if sum(pack) + length <= room), None)
        if pack is None:
            packs.append(pack := [])
        pack.append(length)
    return packs


#: By the names that a scenario's [data] takes (`corpus.BASELINES`).
PLANNERS: dict[str, Planner] = {
    "DHP": dhp,
    "DHP by length": dhp_by_length,
    "DHP without the slow lanes": without_stragglers(dhp),
    "FlexSP": flexsp,
    "static degrees": static_in_order,
    "static degrees by cost": static_by_cost,
}
