"""From shapes to plans: which device of each class takes which place, so that the fewest bytes move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.profile_cost import to_units
from elasticd_planner.grouping.tp_groups import Alike, by_name
from elasticd_planner.placement.state_movement import Held, assign, estimate, holders
from elasticd_planner.search.exhaustive.pipeline_shapes import Shape
from elasticd_planner.spec.plan import Pipeline, Plan, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A pipeline by classes of devices, with its layers by stage and its micro-batches."""

    shape: Shape
    layers: tuple[int, ...]
    micro_batches: int


def place(
    outlines: Sequence[Outline], alike: Sequence[Alike], profile: ModelProfile, current: Plan | None
) -> tuple[Pipeline, ...]:
    """Pipelines with devices: each class's devices go where they lack least if the members of each group are
    lined up so. Deterministic: what is equal goes by name."""
    before = holders(current, profile.share_units)
    slots: dict[int, list[tuple[int, int, int, Held]]] = {}
    for p, outline in enumerate(outlines):
        start = 0
        for s, (group, layers) in enumerate(zip(outline.shape.groups, outline.layers, strict=True)):
            low, last = 0, s == len(outline.layers) - 1
            units = to_units(group.shares, profile.share_units)
            for (index, share), size in zip(group.members, units, strict=True):
                held = Held(start=start, stop=start + layers, low=low, high=low + size, embed=s == 0, head=last)
                slots.setdefault(index, []).append((p, s, share, held))
                low += size
            start += layers
    chosen: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for index, wanted in slots.items():
        names = alike[index].devices
        costs = [[estimate(profile, before.get(name), held) for *_, held in wanted] for name in names]
        for (p, s, share, _), row in zip(wanted, assign(costs), strict=True):
            chosen.setdefault((p, s), []).append((names[row], share))
    pipelines = [
        _pipeline(outline, [chosen[p, s] for s in range(len(outline.layers))])
        for p, outline in enumerate(outlines)
    ]
    return tuple(sorted(pipelines, key=lambda p: by_name(p.stages[0].devices[0])))


def _pipeline(outline: Outline, members: Sequence[Sequence[tuple[str, int]]]) -> Pipeline:
    stages = []
    start = 0
    for layers, group in zip(outline.layers, members, strict=True):
        stages.append(
            Stage(
                start=start,
                stop=start + layers,
                devices=tuple(name for name, _ in group),
                shares=tuple(units for _, units in group),
            )
        )
        start += layers
    return Pipeline(stages=tuple(stages), micro_batches=outline.micro_batches)
