"""Loads of experts that drift, and placements of them: this planner's, EPLB's as published, contiguous ones."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from elasticd_planner.numeric import Floats
from elasticd_planner.placement.expert_placement import arrivals, busiest, least_busiest, placed
from elasticd_planner.spec.plan import HeldExperts, SplitExperts

#: Experts on devices.
SIZES = ((64, 8), (128, 16))
#: Pairs of a row and an expert in a step.
PAIRS = 32768
#: Steps between two placements, and steps that one is made from.
EVERY = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Means over the steps after the first placement, each over that step's bound; and what moved."""

    size: tuple[int, int]
    slow: float
    drift: float
    exact: float  # of the steps that made a placement, the worst
    later: float
    eplb: float
    contiguous: float
    moved: float  # experts a placement


def drifting(
    experts: int, steps: int, rng: np.random.Generator, drift: float, *, stays: bool
) -> Iterator[Floats]:
    """Rows of each expert, step by step: Zipf's, whose logarithms walk at random and return slowly, to where
    they began (`stays`), or to their mean, so that the load becomes even."""
    zipf = np.log(1 / np.arange(1, experts + 1) ** 0.9)[rng.permutation(experts)]
    logs = zipf
    for _ in range(steps):
        logs = logs + rng.normal(0, drift, experts) - 0.02 * (logs - (zipf if stays else logs.mean()))
        chances = np.exp(logs)
        yield rng.multinomial(PAIRS, chances / chances.sum()).astype(float)


def eplb(load: Sequence[float], devices: int, redundant: int) -> tuple[HeldExperts, SplitExperts]:
    """DeepSeek's EPLB in one group (deepseek-ai/EPLB, `replicate_experts` and `balanced_packing`): redundant
    copies of the expert with the largest load a copy, one by one; then copies in descending order to the device
    with the least load of those that have fewer than their number. It knows no speeds. A device with two copies
    takes two parts of an expert's rows."""
    copies = np.ones(len(load), dtype=int)
    for _ in range(redundant):
        copies[np.argmax(np.asarray(load) / copies)] += 1
    listed = sorted(
        ((load[e] / copies[e], e) for e in range(len(load)) for _ in range(copies[e])), reverse=True
    )
    most = -(-len(listed) // devices)
    held: list[Counter[int]] = [Counter() for _ in range(devices)]
    sums, counts = [0.0] * devices, [0] * devices
    for rows, expert in listed:
        device = min((d for d in range(devices) if counts[d] < most), key=lambda d: sums[d])
        held[device][expert] += 1
        sums[device] += rows
        counts[device] += 1
    splits = tuple(
        (expert, *parts)
        for expert in range(len(load))
        if len(parts := [own[expert] for own in held if expert in own]) > 1
    )
    return tuple(tuple(sorted(own)) for own in held), splits


def contiguous(experts: int, devices: int) -> HeldExperts:
    """As many experts on each device, in order."""
    return tuple(tuple(part.tolist()) for part in np.array_split(np.arange(experts), devices))


def score(experts: int, devices: int, slow: float, drift: float, steps: int, *, stays: bool = True) -> Score:
    """Places a drifting load every `EVERY` steps, one of the devices being slow, and scores later steps."""
    rng = np.random.default_rng(experts + devices)
    slowdown = [1.0, slow, *[1.0] * (devices - 2)]
    last: deque[Floats] = deque(maxlen=EVERY)
    even = contiguous(experts, devices)
    scores, exact, moved, ours, theirs = [], [], [], None, None
    for step, load in enumerate(drifting(experts, steps, rng, drift, stays=stays)):
        if ours is not None and theirs is not None:
            bound = least_busiest(load, slowdown)
            held = ((ours.held, ours.splits), theirs, (even, ()))
            scores.append([busiest(load, slowdown, own, splits) / bound for own, splits in held])
        last.append(load)
        if step % EVERY == EVERY - 1:
            mean = np.mean(last, 0).tolist()
            new = placed(mean, slowdown, ours.held if ours is not None else ())
            exact.append(busiest(mean, slowdown, new.held, new.splits) / least_busiest(mean, slowdown))
            if ours is not None:
                moved.append(arrivals(ours.held, new.held))
            ours, theirs = new, eplb(mean, devices, devices)
    later, of_eplb, of_contiguous = np.mean(scores, 0).tolist()
    return Score(
        size=(experts, devices),
        slow=slow,
        drift=drift,
        exact=max(exact),
        later=later,
        eplb=of_eplb,
        contiguous=of_contiguous,
        moved=float(np.mean(moved)),
    )
