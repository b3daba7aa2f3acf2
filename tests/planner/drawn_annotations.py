"""Annotations drawn at random: uneven, nested, of terms and copies, in several groups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

from elasticd_planner.layout.annotations import Annotation, Axis, Parts, State, count_of

DEVICES = tuple(f"n{node}/{index}" for node in range(4) for index in range(8))


def drawn_annotation(
    draw: random.Random, shape: Sequence[int], *, devices: Sequence[str] = DEVICES, terms: bool = True
) -> Annotation:
    """An annotation of a tensor of this shape, whose dimensions are 16 at least; `terms`: of sums or values."""
    free = draw.sample(list(devices), len(devices))
    across = (
        draw.choice(["same", "sum"] if terms else ["same"])
        if draw.random() < 0.6
        else draw.randrange(len(shape))
    )
    count = draw.choice([1, 1, 2, 3])
    same_sums = draw.choice([1, 1, 2]) if terms else 1
    groups, states = [], []
    for _ in range(count):
        sums = same_sums if across == "same" else draw.choice([1, 1, 2]) if terms else 1
        state = _state(draw, len(shape), len(free) // count, sums)
        size = prod(map(count_of, state.values()))
        groups.append([free.pop() for _ in range(size)])
        states.append(state)
    if isinstance(across, int) and draw.random() < 0.5:
        return Annotation(
            groups=groups, states=states, across={across: tuple(draw.choice([1, 2]) for _ in groups)}
        )
    return Annotation(groups=groups, states=states, across=across)  # type: ignore[arg-type]


def _state(draw: random.Random, dims: int, most: int, sums: int) -> State:
    axes: list[tuple[Axis, Parts]] = [("sum", sums)] if sums > 1 else []
    left = most // sums
    wanted: list[Axis] = [*range(dims), "same"]
    for axis in draw.sample(wanted, draw.randint(0, len(wanted))):
        parts: Parts = draw.randint(1, 3)
        if count_of(parts) > left:
            break
        left //= count_of(parts)
        if axis != "same" and count_of(parts) > 1 and draw.random() < 0.5:
            parts = tuple(draw.choice([1, 1, 2]) for _ in range(count_of(parts)))
        axes.append((axis, parts))
    draw.shuffle(axes)
    return dict(axes)
