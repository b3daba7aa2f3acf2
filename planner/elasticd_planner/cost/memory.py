"""Memory: the bytes that devices need under a plan, whether they fit, and how many layers a TP group holds.

What a member needs is linear in the layers of its stage (`need`); everything else here follows from that and
from the cost model's `memory`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from elasticd_planner.cost.model import CostModel
from elasticd_planner.cost.schedule import most_alive
from elasticd_planner.numeric import EQUAL
from elasticd_planner.spec.cluster import Cluster, node_of
from elasticd_planner.spec.plan import Pipeline, Plan, Stage

#: How many times more tokens show what each of them adds; and the most tokens of a row where they add nothing.
_MORE, _MOST = 1.125, 1 << 40


def fits(needed: Mapping[str, int], cluster: Cluster) -> bool:
    """Returns True if every device has the bytes that it needs."""
    return all(size <= cluster.memory[name] for name, size in needed.items())


def memory_by_device(plan: Plan, cost: CostModel) -> dict[str, int]:
    """Bytes that each member needs: its state, and the activations that its schedule keeps (in plain 1F1B those
    of min(m, stages - position) micro-batches; else see `schedule.most_alive`)."""
    needed: dict[str, int] = {}
    cost = cost.under(plan)
    for pipeline in plan.pipelines:
        needed |= pipeline_memory(pipeline, cost)
    if plan.carriers:
        nodes = [len({node_of(name) for name in names}) for names in (plan.places, plan.carriers)]
        copies = min((plan.state.replicas or 0) - nodes[0], nodes[1])
        carried = math.ceil(cost.carried(max(0, copies), len(plan.carriers)))
        needed |= dict.fromkeys(plan.carriers, carried)
    return needed


def pipeline_memory(pipeline: Pipeline, cost: CostModel) -> dict[str, int]:
    """Bytes that each device of one pipeline needs, by the cost of its plan."""
    return {
        device: math.ceil(_needs(lane, index, stage, position, own))
        for lane in pipeline.by_lane
        for index, stage in enumerate(lane.stages)
        for own in (cost.for_stage(stage),)
        for position, device in enumerate(stage.devices)
    }


def _needs(pipeline: Pipeline, index: int, stage: Stage, position: int, cost: CostModel) -> float:
    """Bytes that one member of the stage at `index` needs. The pipeline has a single lane."""
    depth, first, last = len(pipeline.stages), index == 0, index == len(pipeline.stages) - 1
    if pipeline.chunks == 1:
        flying = min(pipeline.micro_batches, depth - index)
        return cost.memory(stage.layers, stage.shares, position, first=first, last=last, in_flight=flying)
    sizes = []
    for chunk, (start, stop) in enumerate(stage.chunks):
        edges = {"first": first and chunk == 0, "last": last and chunk == pipeline.chunks - 1}
        none, one = (cost.memory(stop - start, stage.shares, position, **edges, in_flight=n) for n in (0, 1))
        sizes.append(one - none)  # the activations of one micro-batch
    state = cost.memory(stage.layers, stage.shares, position, first=first, last=last, in_flight=0)
    return state + most_alive(depth, index, pipeline.micro_batches, tuple(sizes))


def most_tokens(lane: Pipeline, sized: Callable[[float], CostModel], memory: Mapping[str, int]) -> int:
    """The most tokens of a row that the memory of every member of a lane holds, with as many rows alive as each
    stage keeps. What a member needs grows with them along lines, each steeper than the one before.

    Args:
        lane: a pipeline of a single lane.
        sized: the cost of its plan for rows of so many tokens.
        memory: of each device [bytes].

    Returns:
        The tokens; 0 where not even the state fits.
    """
    kept = len(lane.stages) * lane.chunks  # no stage keeps more rows than that
    full = msgspec.structs.replace(lane, micro_batches=max(lane.micro_batches, kept))

    def room(index: int, position: int, tokens: float) -> tuple[float, float]:
        """Bytes that are left of a member's memory, and bytes that one more token needs."""
        stage = full.stages[index]
        needs = [
            _needs(full, index, stage, position, sized(size).for_stage(stage))
            for size in (tokens, tokens * _MORE)
        ]
        left = memory[stage.devices[position]] - needs[0]
        return left, (needs[1] - needs[0]) / (tokens * (_MORE - 1))

    most = float(_MOST)
    for index, stage in enumerate(full.stages):
        seen: set[tuple[int, int, int]] = set()
        placed = bool(sized(most).beside_shares(stage))  # members of equal shares may need unlike memory
        for position, device in enumerate(stage.devices):
            key = stage.shares[position], memory[device], position if placed else 0
            if key in seen:
                continue
            seen.add(key)
            left, each = room(index, position, most)
            while left < -memory[device] * EQUAL:
                # The line at `most` tokens lies below what fewer need, so that it meets the memory no sooner.
                if each <= 0 or most + left / each <= 0:
                    return 0
                most += left / each
                left, each = room(index, position, most)
    return math.floor(min(most, _MOST) * (1 + EQUAL))


def need(
    cost: CostModel, shares: Sequence[int], position: int, *, first: bool, last: bool, in_flight: int
) -> tuple[float, float]:
    """Bytes that a member needs in a stage without layers, and bytes that each layer adds."""
    none, one = (
        cost.memory(layers, shares, position, first=first, last=last, in_flight=in_flight) for layers in (0, 1)
    )
    return none, one - none


def most_layers(
    cost: CostModel,
    shares: Sequence[int],
    memory: Sequence[int],
    layers: int,
    *,
    first: bool,
    last: bool,
    in_flight: int,
) -> int:
    """The most layers, at most `layers`, that fit into the memory of every member of a TP group."""
    most, seen = layers, set()
    for position, (share, room) in enumerate(zip(shares, memory, strict=True)):
        if (share, room) in seen:
            continue
        seen.add((share, room))
        none, each = need(cost, shares, position, first=first, last=last, in_flight=in_flight)
        if none > room:
            return 0
        if each > 0:
            most = min(most, math.floor((room - none) / each * (1 + EQUAL)))
    return most


def least_need(cost: CostModel, widest: int, in_flight: Iterable[int]) -> tuple[float, float]:
    """The fewest bytes of a layer on all members of a TP group together, and of a member without layers: over
    every TP size up to `widest` and these numbers of micro-batches in flight."""
    needs = [
        (width, *need(cost, cost.shares((1.0,) * width)[0], 0, first=False, last=False, in_flight=count))
        for width in cost.widths(widest)
        for count in in_flight
    ]
    layer = min((each * width for width, _, each in needs), default=math.inf)
    return layer, min((none for _, none, _ in needs), default=math.inf)


def fewest_devices(
    cost: CostModel, layers: int, devices: int, widths: Iterable[int], memory: int, micro_batches: int
) -> float:
    """The fewest devices of this memory that hold one pipeline, wherever its TP groups are.

    Args:
        layers: of the model.
        devices: that there are at most.
        widths: sizes of TP groups.
        memory: of a device [bytes].
        micro_batches: of the pipeline. Of these a stage keeps as many as stages follow it, and one more.

    Returns:
        The number of devices; inf where more than `devices` are needed.
    """
    shares = {width: cost.shares((1.0,) * width)[0] for width in widths if width <= devices}
    fewest = math.inf
    held = np.full(devices + 1, -math.inf)  # the most layers of the last stages, by the devices of these
    held[0] = 0
    for place in range(min(layers, devices)):
        if place + 1 >= fewest:
            break  # a deeper pipeline has more devices
        more = np.full(devices + 1, -math.inf)
        for width, parts in shares.items():
            for first in (True, False):
                kept, last = min(place + 1, micro_batches), place == 0
                own = (memory,) * width
                room = most_layers(cost, parts, own, layers, first=first, last=last, in_flight=kept)
                reached = held[: devices + 1 - width] + (room if room else -math.inf)
                if first:
                    enough = np.flatnonzero(reached >= layers)
                    fewest = min(fewest, int(enough[0]) + width) if enough.size else fewest
                else:
                    np.maximum(more[width:], reached, out=more[width:])
        held = more
    return fewest
