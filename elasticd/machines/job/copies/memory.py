"""Whether a switch to a plan fits the devices' memory: beside the old copy of the state, or only in place.

The planner counts with parts of a profile, evenly spread; where replicas must be on different nodes, one device
may have to keep more than its part. And a switch holds two copies for a while, of all boxes that change: where
both do not fit, state can only move in place. Old boxes then give their memory to new ones as these come. If
that fails midway nobody has a complete copy of either plan, and replicas do not help: each has given something
up. So it is done only where an older state can be read now.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import ModelSpec, item_size
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value

from elasticd.machines.job.copies.rollback import Source
from elasticd.machines.job.copies.snapshots import secured
from elasticd.machines.job.state.transaction import Turn


class Room(Value, frozen=True, kw_only=True):
    """Whether the devices hold a plan's state."""

    lacks: str = ""  # the device that cannot hold its part of the plan, in words
    cramped: str = ""  # the device that can, but not beside what it holds now, in words


def room_for(turn: Turn, plan: Plan, source: Source | None) -> Room:
    """For a switch to `plan` from the plan in force; after a fence, from `source`. Cramped: state can move in
    place, which is safe."""
    job = turn.job
    if job.spec is None or job.profile is None:
        return Room()
    older = source is not None and (source.plan is None or bool(source.recovery.snapshots))
    old = source.plan if source is not None and not older else job.plan
    holders = {worker.device for worker in job.bound(old)}
    memory = {
        device.name: turn.settings.usable(device.memory)
        for node in turn.nodes.values()
        for device in node.record.devices
    }
    found = room(plan, old, job.spec.model, job.profile, memory, holders=holders, anew=older)
    # An older state is read from where it stays; of `old` no copy is needed once snapshots of it can be read.
    if not found.cramped or older or old is None or secured(turn, old) is not None:
        return found
    return Room(
        lacks=f"{found.cramped}; it could move in place if snapshots (CheckpointingOptions(snapshot_every=...))"
        " kept the state safe meanwhile"
    )


def room(
    plan: Plan,
    old: Plan | None,
    spec: ModelSpec,
    profile: ModelProfile,
    memory: Mapping[str, int],
    *,
    holders: Collection[str] = (),
    anew: bool = False,
) -> Room:
    """For a switch from `old` (None: from nothing) to `plan`. Without ZeRO the planner alone says whether one
    copy fits. memory: bytes that each device may use; holders: whoever has its copy of `old`; anew: all of
    `plan` is read from elsewhere, not only what changes."""
    new = Layouts(spec, plan)
    if plan.state.zero:
        needs = _resident(new, profile)
        for device in plan.members:
            if needs[device] > memory.get(device, math.inf):
                return Room(
                    lacks=f"{device} would have to keep {_mib(needs[device])} of state and has "
                    f"{_mib(memory[device])}: {plan.state.replicas} replicas on different nodes ask too "
                    "much of it; take fewer, or more memory on its node"
                )
    if old is None:
        return Room()
    before = Layouts(spec, old)
    changed = _changed(before, new, profile, anew=anew)
    both = _resident(before, profile) if changed else {}
    for device, size in changed.items():
        need = both.get(device, 0.0) * (device in holders) + size
        if need > memory.get(device, math.inf):
            text = (
                f"{device} has {_mib(memory[device])} and would need {_mib(need)} for the old copy and the new"
            )
            return Room(cramped=text)
    return Room()


def _mib(size: float) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _resident(layouts: Layouts, profile: ModelProfile) -> dict[str, float]:
    """Bytes of values, gradients and state that each device holds while it trains."""
    trained, zero = frozenset(layouts.trained), layouts.plan.state.zero
    found: dict[str, float] = defaultdict(float)
    for item, count in _kinds(layouts):
        factor = _factor(item, profile)
        # Under ZeRO 2 gradients lie where the state is kept, else where the values are.
        if (item.role == "state" and zero == 2) or (
            item.role == "value" and item.name in trained and zero != 2
        ):
            factor += profile.gradient_factor
        layout = layouts.layout(item)
        each = count * item_size(layout.dtype) * factor
        sizes: dict[Box, float] = {}
        for holding in layout.holdings:
            if holding.box not in sizes:
                sizes[holding.box] = holding.box.size * each
            found[holding.device] += sizes[holding.box]
    return found


def _changed(old: Layouts, new: Layouts, profile: ModelProfile, *, anew: bool) -> dict[str, float]:
    """Bytes of values and state that each device holds in other boxes than before: they are made beside the
    old."""
    found: dict[str, float] = defaultdict(float)
    for item, count in _kinds(new, old):
        layout = new.layout(item)
        if not anew and layout.holdings == old.layout(item).holdings:
            continue
        size = count * item_size(layout.dtype) * _factor(item, profile)
        for device in {holding.device for holding in layout.holdings}:
            boxes = new.boxes(item, device)
            if anew or boxes != old.boxes(item, device):
                found[device] += size * sum(box.size for box in boxes)
    return found


def _kinds(layouts: Layouts, *others: Layouts) -> list[tuple[Item, int]]:
    """The items by kind: the first of those that are alike under all of these, and how many they are."""
    kinds: dict[Hashable, list[Item]] = defaultdict(list)
    for item in layouts.items:
        kinds[item.role, *(each.family(item) for each in (layouts, *others))].append(item)
    return [(alike[0], len(alike)) for alike in kinds.values()]


def _factor(item: Item, profile: ModelProfile) -> float:
    return profile.optimizer_factor if item.role == "state" else 1.0
