"""The communicators of a plan's data plane: which there are, and of which each device is a member.

There is one for each TP group, one for each direction between two devices of neighbouring stages, and one for
each set of devices that reduce gradients together, up to a limit for each device: where pipelines are unlike, a
parameter is cut at all their borders, and a device may be in dozens of sets. Sets beyond the limit, those with
the fewest bytes, and what ZeRO delivers, go as messages over one communicator of all members.

Where sequences may be cut over lanes, the devices of a stage with several lanes have one communicator more, for
keys and values: it is the same whichever lanes share a sequence. Every plan with lanes has room for it. So do
those of a stage whose lanes share experts, for the rows that go to them.

The limit is about NCCL, whose communicators take memory of the device. Over gloo a set that is summed in two
levels is one communicator in this count, and three groups with fewer connections than a single one has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from elasticd_planner.layout.flows import FlowMessage, stage_flows
from elasticd_planner.layout.gradient_reduction import Reduction, reductions
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.model import item_size
from elasticd_planner.spec.plan import Edge, Pipeline, Plan

#: Communicators that a device has at most, as far as sets that reduce gradients can be fewer.
MOST = 24

#: What a communicator is for. "tensor": collectives inside of sections. "reduce": sums of gradients.
#: "activation", "gradient": between stages, forth and back. "state": what ZeRO delivers, between any members.
#: "context": keys and values of cut sequences, between any members of a stage's lanes. "items": what a module
#: of items makes, and its gradients back, between any members of both ends. "experts": rows and outputs of
#: experts, between any members of a stage's lanes.
Use = Literal["tensor", "reduce", "activation", "gradient", "state", "context", "items", "experts"]


class Channel(NamedTuple):
    """A communicator: what it is for, and its members in the order of their ranks in it. Activations and
    gradients go from the first of two members to the second."""

    use: Use
    members: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.use} {' '.join(self.members)}"


def channels(layouts: Layouts, device: str, *, cuts: bool = False) -> tuple[Channel, ...]:
    """The communicators that a device is a member of, in an order that is the same on all devices.

    Args:
        layouts: of the plan.
        device: one of its members.
        cuts: whether sequences may be cut over lanes.
    """
    return channels_by_device(layouts, (device,), cuts=cuts)[device]


def channels_of_modules(layouts: Layouts, device: str, *, cuts: bool = False) -> tuple[Channel, ...]:
    """`channels` of a device over all modules of a plan, and those of the borders between modules."""
    plan = layouts.plan
    if len(plan.modules) == 1:
        return channels(layouts, device, cuts=cuts)
    rank = {name: index for index, name in enumerate(plan.members)}
    own = {item_channel(plan, edge) for edge in plan.edges}
    found = {channel for channel in own if device in channel.members}
    for view in layouts.views.values():
        if device in view.plan.members:
            found.update(channels(view, device, cuts=cuts))
    return tuple(sorted(found, key=lambda each: ([rank[name] for name in each.members], each.use)))


def item_channel(plan: Plan, edge: Edge) -> Channel:
    """The communicator of a border between modules: of the last stages of the module of items, and of the first
    ones of the module that takes them."""
    source, target = (
        {device for lane in plan.view(name).by_lane for device in lane.stages[at].devices}
        for name, at in ((edge.source, -1), (edge.target, 0))
    )
    return Channel("items", tuple(device for device in plan.members if device in source | target))


def channels_by_device(
    layouts: Layouts, devices: Sequence[str] | None = None, *, cuts: bool = False
) -> dict[str, tuple[Channel, ...]]:
    """`channels` of each of some devices; None: of all members of the plan."""
    plan, sets, fixed = layouts.plan, _sets(layouts), _fixed(layouts.plan)
    own = _chosen(layouts, sets, fixed, MOST)
    rank = {name: index for index, name in enumerate(plan.members)}
    among = len(plan.members) > 1 and (plan.state.zero or len(own) < len(sets))
    reducing: dict[str, set[Channel]] = defaultdict(set)
    for members in own:
        for device in members:
            reducing[device].add(Channel("reduce", members))

    def order(channel: Channel) -> tuple[list[int], str]:
        return [rank[name] for name in channel.members], channel.use

    state = {Channel("state", plan.members)} if among else set()
    listed = plan.members if devices is None else devices
    return {
        device: tuple(
            sorted(
                (each for each in fixed[device] | reducing[device] | state if cuts or each.use != "context"),
                key=order,
            )
        )
        for device in listed
    }


def own_sets(layouts: Layouts, most: int | None = None) -> frozenset[tuple[str, ...]]:
    """The sets of devices that reduce gradients over a communicator of their own, the same for all devices.

    Args:
        layouts: of the plan.
        most: communicators of a device, one of all members included. None: `MOST`.
    """
    return _chosen(layouts, _sets(layouts), _fixed(layouts.plan), MOST if most is None else most)


def _sets(layouts: Layouts) -> list[Reduction]:
    return [reduction for reduction in reductions(layouts) if len(reduction.devices) > 1]


#: By device the communicators that it has whatever reduces gradients.
_Fixed = Mapping[str, set[Channel]]


def _chosen(
    layouts: Layouts, sets: Sequence[Reduction], fixed: _Fixed, most: int
) -> frozenset[tuple[str, ...]]:
    """One after the other, those with most bytes first, where all their devices have room."""
    plan = layouts.plan
    room = {device: most - 1 - len(fixed[device]) for device in plan.members}
    rank = {name: index for index, name in enumerate(plan.members)}

    def size(reduction: Reduction) -> int:
        return sum(piece.box.size * item_size(layouts.rule(piece.name).dtype) for piece in reduction.pieces)

    found: set[tuple[str, ...]] = set()
    for reduction in sorted(sets, key=lambda each: (-size(each), [rank[name] for name in each.devices])):
        if all(room[device] > 0 for device in reduction.devices):
            found.add(reduction.devices)
            for device in reduction.devices:
                room[device] -= 1
    return frozenset(found)


def _fixed(plan: Plan) -> _Fixed:
    """Those of TP groups, of the boundaries of stages, and of lanes."""
    found: dict[str, set[Channel]] = defaultdict(set)
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    of_lanes = (Channel("context", stage.devices) for stage in stages if stage.lanes)
    of_experts = (Channel("experts", stage.devices) for stage in stages if stage.shared_blocks)
    for channel in chain(of_lanes, of_experts, *map(_of_lane, plan.by_lane)):
        for device in channel.members:
            found[device].add(channel)
    return found


def _of_lane(pipeline: Pipeline) -> Iterator[Channel]:
    for stage in pipeline.stages:
        if len(stage.devices) > 1:
            yield Channel("tensor", stage.devices)
    for flow, _ in stage_flows(pipeline):
        ways: dict[Use, Sequence[FlowMessage]] = {"activation": flow.forth, "gradient": flow.back}
        for use, sent in ways.items():
            yield from (Channel(use, (each.source, to)) for each in sent for to in each.destinations)
