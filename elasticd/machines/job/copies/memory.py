"""The memory of a switch on the devices: beside the old copy of the state, with that aside, or in place.

The planner counts with parts of a profile, evenly spread; where replicas must be on different nodes, one device
may have to keep more than its part. And a switch holds two copies for a while, of all boxes that change: where
both do not fit, what changes of the old copy goes to the host's memory meanwhile, if the device has memory of
its own and its node has room. Else state can only move in place. Old boxes then give their memory to new ones
as these come. If that fails midway nobody has a complete copy of either plan, and replicas do not help: each
has given something up. So it is done only where an older state can be read now.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.model import Specs, item_size
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Value

from elasticd.machines.job.copies.rollback import Source
from elasticd.machines.job.copies.snapshots import secured
from elasticd.machines.job.state.transaction import Transaction

#: The part of a node's free memory that old copies may take during a switch.
HOST_PART = 0.75


class Room(Value, frozen=True, kw_only=True):
    """The devices' room for a plan's state."""

    lacks: str = ""  # the device that cannot hold its part of the plan, in words
    cramped: str = ""  # the device that can, but not beside what it holds now, in words
    #: [bytes] Of each such device: what it holds now in boxes that change.
    changing: dict[str, float] = msgspec.field(default_factory=dict)
    #: Those devices, where their nodes' memory has room for that.
    aside: tuple[str, ...] = ()


def room_for(turn: Transaction, plan: JobPlan, source: Source | None) -> Room:
    """For a switch to `plan` from the plan in force; after a fence, from `source`. Cramped: state can move in
    place, which is safe. Of a job on a mesh no bytes are known."""
    job, spec = turn.job, turn.job.pipeline_spec
    if spec is None or job.learned.profile is None or not isinstance(plan, Plan):
        return Room()
    older = source is not None and (source.plan is None or source.recovery.all_read(source.plan))
    before = source.plan if source is not None and not older else job.plan
    old = before if isinstance(before, Plan) else None
    holders = {worker.device for worker in job.bound(old)}
    memory = {
        device.name: turn.settings.usable(device.memory)
        for node in turn.nodes.values()
        for device in node.record.devices
    }
    free = room(plan, old, spec.specs, job.learned.profile, memory, holders=holders, anew=older)
    if free.cramped and not older and not job.switching.no_aside and _hosts_hold(turn, free.changing):
        return msgspec.structs.replace(free, aside=tuple(sorted(free.changing)))
    # An older state is read from where it stays; of `old` no copy is needed once snapshots of it can be read.
    if not free.cramped or older or old is None or secured(turn, old) is not None:
        return free
    return Room(
        lacks=f"{free.cramped}; it could move in place if snapshots (CheckpointingOptions(snapshot_every=...))"
        " kept the state safe meanwhile"
    )


def room(
    plan: Plan,
    old: Plan | None,
    specs: Specs,
    profile: ModelProfile,
    memory: Mapping[str, int],
    *,
    holders: Collection[str] = (),
    anew: bool = False,
) -> Room:
    """For a switch from `old` (None: from nothing) to `plan`. Without ZeRO the planner alone says whether one
    copy fits. memory: bytes that each device may use; holders: whoever has its copy of `old`; anew: all of
    `plan` is read from elsewhere, not only what changes."""
    new = Layouts(specs, plan)
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
    before = Layouts(specs, old)
    changed = _changed(before, new, profile, anew=anew)
    both = _resident(before, profile) if changed else {}
    needs = {device: both.get(device, 0.0) * (device in holders) + size for device, size in changed.items()}
    short = [device for device, need in needs.items() if need > memory.get(device, math.inf)]
    if not short:
        return Room()
    first, leaves = short[0], _changed(new, before, profile, anew=False)
    return Room(
        cramped=f"{first} has {_mib(memory[first])} and would need {_mib(needs[first])} for the old copy and "
        "the new",
        changing={device: leaves.get(device, 0.0) for device in short},
    )


def _hosts_hold(turn: Transaction, changing: Mapping[str, float]) -> bool:
    """Returns True if each of these devices has memory of its own, and its node has room for what changes
    there."""
    asked: dict[str, float] = defaultdict(float)
    for device, size in changing.items():
        worker = turn.job.workers.get(device)
        if worker is None or worker.computes_on is None or worker.computes_on.name == "cpu":
            return False
        asked[worker.node] += size
    for name, size in asked.items():
        node = turn.nodes.get(name)
        free = node.health.memory_available if node is not None and node.health is not None else None
        if free is None or size > HOST_PART * free:
            return False
    return True


def _mib(size: float) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _resident(layouts: Layouts, profile: ModelProfile) -> dict[str, float]:
    """Bytes of values, gradients and state that each device holds while it trains. Gradients lie where values
    do, under every policy: micro-batches add up to complete ones."""
    trained = frozenset(layouts.trained)
    resident: dict[str, float] = defaultdict(float)
    for item, count in _kinds(layouts):
        factor = _factor(item, profile)
        if item.role == "value" and item.name in trained:
            factor += profile.gradient_factor
        layout = layouts.layout(item)
        each = count * item_size(layout.dtype) * factor
        sizes: dict[Box, float] = {}
        for holding in layout.holdings:
            if holding.box not in sizes:
                sizes[holding.box] = holding.box.size * each
            resident[holding.device] += sizes[holding.box]
    return resident


def _changed(old: Layouts, new: Layouts, profile: ModelProfile, *, anew: bool) -> dict[str, float]:
    """Bytes of values and state that each device holds in other boxes than before: they are made beside the
    old."""
    changed: dict[str, float] = defaultdict(float)
    for item, count in _kinds(new, old):
        layout = new.layout(item)
        if not anew and layout.holdings == old.layout(item).holdings:
            continue
        size = count * item_size(layout.dtype) * _factor(item, profile)
        for device in {holding.device for holding in layout.holdings}:
            boxes = new.boxes(item, device)
            if anew or boxes != old.boxes(item, device):
                changed[device] += size * sum(box.size for box in boxes)
    return changed


def _kinds(layouts: Layouts, *others: Layouts) -> list[tuple[Item, int]]:
    """The items by kind: the first of those that are alike under all of these, and how many they are."""
    kinds: dict[Hashable, list[Item]] = defaultdict(list)
    for item in layouts.items:
        kinds[item.role, *(each.family(item) for each in (layouts, *others))].append(item)
    return [(alike[0], len(alike)) for alike in kinds.values()]


def _factor(item: Item, profile: ModelProfile) -> float:
    return profile.optimizer_factor if item.role == "state" else 1.0
