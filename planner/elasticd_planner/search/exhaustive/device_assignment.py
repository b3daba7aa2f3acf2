"""From shapes to plans: which device of each class takes which place, so that the fewest bytes move."""

from __future__ import annotations

from collections.abc import Sequence

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.cost.profile_cost import to_units
from elasticd_planner.grouping.tp_groups import Alike, by_name
from elasticd_planner.placement.state_movement import Held, assign, estimate, holders
from elasticd_planner.search.exhaustive.pipeline_shapes import Option
from elasticd_planner.spec.plan import Pipeline, Plan


def place(
    options: Sequence[Option],
    micro_batches: Sequence[int],
    alike: Sequence[Alike],
    profile: ModelProfile,
    current: Plan | None,
) -> tuple[Pipeline, ...]:
    """Pipelines with devices: each class's devices go where they lack least if the members of each group are
    lined up so. Deterministic: what is equal goes by name."""
    before = holders(current, profile.share_units)
    slots: dict[int, list[tuple[int, int, int, Held]]] = {}
    for p, option in enumerate(options):
        start = 0
        for s, (group, layers) in enumerate(zip(option.shape.groups, option.layers, strict=True)):
            low, last = 0, s == len(option.layers) - 1
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
    pipelines = []
    for p, (option, count) in enumerate(zip(options, micro_batches, strict=True)):
        stages = [zip(*chosen[p, s], strict=True) for s in range(len(option.layers))]
        groups = [(tuple(names), tuple(shares)) for names, shares in stages]
        pipelines.append(Pipeline.from_layers(groups, option.layers, count))
    return tuple(sorted(pipelines, key=lambda p: by_name(p.stages[0].devices[0])))
