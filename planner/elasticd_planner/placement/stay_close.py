"""Staying close to the running plan: which equal device takes which place, and which shares its groups get.

`nearest` exchanges devices for equal devices so that the fewest bytes of state move: whole nodes of one kind
first, then devices of one class inside each node. (`exhaustive.place` is exact for a few devices;
`tp_rank_order` orders the members of each group afterwards.)

`rebalance_shares` keeps the running plan's groups and layers and gives them other shares. A slow device that
gives away less than its rate asks moves fewer bytes, and with fewer micro-batches its pipeline may take no
longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.grouping.node_partitions import NodeKind
from elasticd_planner.placement.state_movement import Held, Holders, assign, estimate, held_by, holders
from elasticd_planner.spec.cluster import Rates, rate_of
from elasticd_planner.spec.model import apportion
from elasticd_planner.spec.plan import Pipeline, Plan, Stage

#: Nodes of one kind that are compared pair by pair; of more, equal ones are matched and the rest left in order.
COMPARED_NODES = 16

#: Devices of one class in a node whose places are chosen exactly.
COMPARED_DEVICES = 8

#: How much of a device's slowdown its share follows: all of it or nothing (equal shares), and parts between.
WHOLE = (1.0, 0.0)
BETWEEN = (0.75, 0.5, 0.25)


def nearest(
    pipelines: Sequence[Pipeline], kinds: Sequence[NodeKind], profile: ModelProfile, current: Plan | None
) -> tuple[Pipeline, ...]:
    """The same pipelines on devices that hold much of what they need."""
    if current is None:
        return tuple(pipelines)
    before = holders(current, profile.share_units)
    wanted = held_by(pipelines, profile.share_units)
    names: dict[str, str] = {}
    for kind in kinds:
        for virtual, real in zip(kind.nodes, _matched(kind, wanted, before, profile), strict=True):
            for old, new in zip(virtual, real, strict=True):
                names.update(_devices(old, new, wanted, before, profile))
    return tuple(_renamed(pipeline, names) for pipeline in pipelines)


def _matched(
    kind: NodeKind, wanted: Holders, before: Holders, profile: ModelProfile
) -> list[tuple[tuple[str, ...], ...]]:
    """For each node of a kind, in order, the node that takes its place."""
    nodes = list(kind.nodes)
    if len(nodes) == 1:
        return nodes
    if len(nodes) <= COMPARED_NODES:
        costs = [
            [
                sum(_lack(old, new, wanted, before, profile) for old, new in zip(virtual, real, strict=True))
                for virtual in nodes
            ]
            for real in nodes
        ]
        return [nodes[row] for row in assign(costs)]
    free: dict[tuple[tuple[object, ...], ...], list[int]] = {}
    for index, node in enumerate(nodes):
        key = tuple(tuple(sorted(map(repr, map(before.get, names)))) for names in node)
        free.setdefault(key, []).append(index)
    chosen: list[int | None] = []
    for node in nodes:
        key = tuple(tuple(sorted(map(repr, map(wanted.get, names)))) for names in node)
        listed = free.get(key)
        chosen.append(listed.pop(0) if listed else None)
    rest = iter(sorted(set(range(len(nodes))) - {index for index in chosen if index is not None}))
    return [nodes[next(rest) if index is None else index] for index in chosen]


def _lack(
    virtual: Sequence[str], real: Sequence[str], wanted: Holders, before: Holders, profile: ModelProfile
) -> float:
    """Bytes lacking about, devices of a class taken in the order of what they hold."""
    slots = sorted((wanted[name] for name in virtual if name in wanted), key=_place)
    have = sorted((before.get(name) for name in real), key=lambda held: _place(held) if held else (1 << 30, 0))
    return sum(estimate(profile, held, slot) for slot, held in zip(slots, have, strict=False))


def _place(held: Held) -> tuple[int, int]:
    return held.start, held.low


def _devices(
    virtual: Sequence[str], real: Sequence[str], wanted: Holders, before: Holders, profile: ModelProfile
) -> dict[str, str]:
    """Devices of one class of a node for those of another: idle ones get what is left."""
    slots = [name for name in virtual if name in wanted]
    if not slots:
        return {}
    if len(real) > COMPARED_DEVICES:
        return dict(zip(slots, real, strict=False))
    costs = [[estimate(profile, before.get(name), wanted[slot]) for slot in slots] for name in real]
    return {slot: real[row] for slot, row in zip(slots, assign(costs), strict=True)}


def _renamed(pipeline: Pipeline, names: dict[str, str]) -> Pipeline:
    def renamed(stage: Stage) -> Stage:
        return msgspec.structs.replace(stage, devices=tuple(names[device] for device in stage.devices))

    return pipeline.with_stages(renamed)


def rebalance_shares(
    pipelines: Sequence[Pipeline], rates: Rates, profile: ModelProfile, part: float
) -> tuple[Pipeline, ...]:
    """The same groups and layers; a member's share is by 1 / rate ** part, in whole units."""
    part = part if profile.uneven else 0.0

    def stage(given: Stage) -> Stage:
        # Integer weights with six digits: rates are rounded far coarser than that.
        weights = (max(1, round(1e6 / rate_of(rates, device) ** part)) for device in given.devices)
        return msgspec.structs.replace(given, shares=apportion(profile.share_units, tuple(weights)))

    return tuple(pipeline.with_stages(stage) for pipeline in pipelines)
