"""The communicators of a plan's data plane: which there are, and of which each device is a member.

There is one for each TP group, one for each direction between two devices of neighbouring stages, and one for
each set of devices that reduce gradients together, up to a limit for each device: where pipelines are unlike, a
parameter is cut at all their borders, and a device may be in dozens of sets. Sets beyond the limit, those with
the fewest bytes, and what ZeRO delivers, go as messages over one communicator of all members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from elasticd_planner.layout.gradient_reduction import Reduction, reductions
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.stage_boundary import Border, after, before
from elasticd_planner.spec.model import item_size
from elasticd_planner.spec.plan import Pipeline, Place, Plan

#: Communicators that a device has at most, as far as sets that reduce gradients can be fewer.
MOST = 24

#: What a communicator is for. "tensor": collectives inside of sections. "reduce": sums of gradients.
#: "activation", "gradient": between stages, forth and back. "state": what ZeRO delivers, between any members.
Use = Literal["tensor", "reduce", "activation", "gradient", "state"]


class Channel(NamedTuple):
    """A communicator: what it is for, and its members in rank order. Activations and gradients go from the
    first of two members to the second."""

    use: Use
    members: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.use} {' '.join(self.members)}"


def channels(layouts: Layouts, device: str) -> tuple[Channel, ...]:
    """The communicators that a device is a member of, in an order that is the same on all devices."""
    plan, sets = layouts.plan, _sets(layouts)
    own = _chosen(layouts, sets, MOST)
    found = _fixed(plan, device) | {Channel("reduce", devices) for devices in own if device in devices}
    if len(plan.members) > 1 and (plan.state.zero or len(own) < len(sets)):
        found.add(Channel("state", plan.members))
    rank = {name: index for index, name in enumerate(plan.members)}
    return tuple(sorted(found, key=lambda channel: ([rank[name] for name in channel.members], channel.use)))


def own_sets(layouts: Layouts, most: int | None = None) -> frozenset[tuple[str, ...]]:
    """The sets of devices that reduce gradients over a communicator of their own, the same for all devices.

    Args:
        layouts: of the plan.
        most: communicators of a device, one of all members included. None: `MOST`.
    """
    return _chosen(layouts, _sets(layouts), MOST if most is None else most)


def _sets(layouts: Layouts) -> list[Reduction]:
    return [reduction for reduction in reductions(layouts) if len(reduction.devices) > 1]


def _chosen(layouts: Layouts, sets: Sequence[Reduction], most: int) -> frozenset[tuple[str, ...]]:
    """One after the other, those with most bytes first, where all their devices have room."""
    plan = layouts.plan
    room = {device: most - 1 - len(_fixed(plan, device)) for device in plan.members}
    rank = {name: index for index, name in enumerate(plan.members)}

    def size(reduction: Reduction) -> int:
        return sum(
            piece.box.size * item_size(layouts.parameter(piece.name).dtype) for piece in reduction.pieces
        )

    found: set[tuple[str, ...]] = set()
    for reduction in sorted(sets, key=lambda each: (-size(each), [rank[name] for name in each.devices])):
        if all(room[device] > 0 for device in reduction.devices):
            found.add(reduction.devices)
            for device in reduction.devices:
                room[device] -= 1
    return frozenset(found)


def _fixed(plan: Plan, device: str) -> set[Channel]:
    """Those of its TP group and of the boundaries of its stage."""
    found: set[Channel] = set()
    if device in plan.places:
        place = plan.places[device]
        pipeline, stage = plan.pipeline(place), plan.stage(place)
        if len(stage.devices) > 1:
            found.add(Channel("tensor", stage.devices))
        for receives, sends, border in _borders(pipeline, place, device):
            found.add(Channel(receives, (border.source, device)))
            found |= {Channel(sends, (device, to)) for to in border.destinations}
    return {channel for channel in found if device in channel.members}


def _borders(pipeline: Pipeline, place: Place, device: str) -> Iterator[tuple[Use, Use, Border]]:
    """What a device receives, what it sends, and with whom: at each boundary that its stage has."""
    stage, turns = pipeline.stages[place.stage], pipeline.chunks > 1
    if len(pipeline.stages) > 1 and (stage.start > 0 or turns):
        yield "activation", "gradient", before(pipeline, place, device)
    if len(pipeline.stages) > 1 and (stage.stop < pipeline.layers or turns):
        yield "gradient", "activation", after(pipeline, place, device)
