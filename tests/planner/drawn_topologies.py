"""Clusters of unlike nodes, drawn by seed, and where the planner puts TP groups on them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elasticd_planner.cost.memory import fits, memory_by_device
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.model_profile import SectionProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search import planner
from elasticd_planner.spec.cluster import Cluster, Device, Level, Link, Node, node_of, rate_of
from elasticd_planner.spec.plan import Plan, StatePolicy
from msgspec import structs

from tests.planner.models import profile, replica_bytes

#: Sizes that a TP group may have; none listed: any. Where all are more than any node has, groups must cross.
WIDTHS = ((), (1, 2, 4), (2, 4), (4, 8))
STATES = (StatePolicy(), StatePolicy(zero=1, replicas=1), StatePolicy(zero=2, replicas=1))


def problem(seed: int) -> Problem:
    """Two to four nodes of one to eight devices, with islands, racks and slow devices, and with memory that
    differs by node and often binds; a model of four or six layers. Some say which sizes a TP group may have."""
    draw = random.Random(f"topology {seed}")
    model = profile(
        layers=draw.choice([4, 6]),
        share_units=8,
        block=SectionProfile(
            seconds=draw.choice([1e-5, 1e-4, 1e-3]),
            cut_bytes=800_000,
            whole_bytes=1_000,
            collectives=4,
            cut_activation=draw.choice([0.0, 50.0]),
        ),
        embed=SectionProfile(cut_bytes=100_000, collectives=1),
        head=SectionProfile(seconds=1e-5, cut_bytes=100_000, collectives=1),
        boundary_bytes=draw.choice([512.0, 4096.0, 65536.0]),
    )
    model = structs.replace(model, widths=draw.choice(WIDTHS))
    counts = [draw.randint(1, 8) for _ in range(draw.randint(2, 4))]
    island = draw.choice([0, 0, 2, 4])
    replica = replica_bytes(model)
    room = [draw.choice([0.3, 0.6, 1.2, 4.0, 50.0]) for _ in range(2)]
    nodes = []
    for n, count in enumerate(counts):
        memory = math.ceil(replica * draw.choice(room) / max(counts)) + 100_000
        devices = tuple(Device(name=f"n{n}/{i}", memory=memory) for i in range(count))
        nodes.append(Node(name=f"n{n}", devices=devices, island=island if count > island else 0))
    racks = tuple(tuple(node.name for node in nodes[at : at + 2]) for at in range(0, len(nodes), 2))
    network = draw.choice([1e7, 1e8, 1e9])
    cluster = Cluster(
        nodes=tuple(nodes),
        within=Link(bandwidth=1e11, latency=1e-6),
        inside=Link(bandwidth=draw.choice([1e9, 1e10]), latency=1e-5),
        levels=(Level(name="rack", link=Link(bandwidth=2 * network), groups=racks),)
        if draw.random() < 0.5
        else (),
        between=Link(bandwidth=network, latency=draw.choice([1e-5, 1e-4])),
    )
    names = [device.name for device in cluster.devices]
    speeds = draw.choice([(2.0,), (1.5, 4.0)])
    slow = {name: draw.choice(speeds) for name in names if draw.random() < draw.choice([0.0, 0.1, 0.3])}
    return Problem(
        cluster=cluster,
        profile=model,
        rates=slow,
        global_batch=draw.choice([4, 6]),
        micro_batch=1,
        search_space=SearchSpace(
            states=(draw.choice(STATES),),
            recompute=draw.random() < 0.2,
            lanes=draw.choice([1, 1, 1, 2]),
            fixed_tp=draw.choice([None, None, None, 2, 4]),
        ),
    )


def tp_groups(plan: Plan) -> Iterator[tuple[str, ...]]:
    """The devices of each TP group: a lane of a stage."""
    for pipeline in plan.by_lane:
        for stage in pipeline.stages:
            yield stage.devices


def nodes_of(devices: Sequence[str]) -> set[str]:
    """The nodes of a group."""
    return {node_of(device) for device in devices}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """How one drawn problem was planned."""

    #: None: there is no plan.
    groups: int | None
    #: TP groups that cross nodes.
    across: int = 0
    #: Whether groups must: a group has more devices than any node.
    must: bool = False
    #: The predicted seconds of a step: of the plan, of its shape on devices in the order of their names, in the
    #: best of some random orders, and in the best of some that keep each TP group to a node; inf where none is
    #: `allowed` with the memory that it needs.
    seconds: float = 0.0
    naive: float = math.inf
    drawn: float = math.inf
    kept: float = math.inf
    #: The same of the best of these orders that are not allowed: with TP groups that cross nodes.
    other: float = math.inf

    @property
    def beaten(self) -> float:
        """The plan's seconds over those of the best order that is allowed: above 1 where it beats the plan."""
        return self.seconds / min(self.naive, self.drawn, self.kept)


def placed(seed: int, orders: int = 5) -> Placed:
    """Plans the problem of a seed, and its plan's shape on devices in other orders."""
    return judged(problem(seed), random.Random(seed), orders)


def judged(given: Problem, draw: random.Random, orders: int = 5) -> Placed:
    """The same of any problem."""
    made = planner.plan(given).plan
    if made is None:
        return Placed(groups=None)
    assert made.prediction is not None
    groups = list(tp_groups(made))
    most = max(len(node.devices) for node in given.cluster.nodes)
    must = not any(width <= most for width in given.profile.widths or (1,))
    across = sum(len(nodes_of(group)) > 1 for group in groups)
    tried = {
        "naive": [mapped(made, in_order(made))],
        "drawn": [mapped(made, shuffled(made, draw)) for _ in range(orders)],
        "kept": [mapped(made, kept(given, made, draw)) for _ in range(orders)],
    }
    found = {
        name: [(seconds(given, other), allowed(given, made, other)) for other in listed if pinned(given, other)]
        for name, listed in tried.items()
    }
    return Placed(
        groups=len(groups),
        across=across,
        must=must,
        seconds=made.prediction.step_seconds,
        other=min((each for listed in found.values() for each, may in listed if not may), default=math.inf),
        **{
            name: min((each for each, may in listed if may), default=math.inf) for name, listed in found.items()
        },
    )


def pinned(given: Problem, plan: Plan) -> bool:
    """Whether TP groups have the pinned size on nodes of normal devices."""
    size, slow = given.search_space.fixed_tp, nodes_of([name for name, rate in given.rates.items() if rate > 1])
    return all(size in (None, len(group)) or slow & nodes_of(group) for group in tp_groups(plan))


def allowed(given: Problem, plan: Plan, other: Plan) -> bool:
    """Whether a plan's shape may have these devices: TP groups that keep to nodes. Others count all the same
    where two devices of a node have the quickest link, as in most clusters: there they must be slower."""
    crossing, before = (sum(len(nodes_of(group)) > 1 for group in tp_groups(each)) for each in (other, plan))
    return crossing <= before or inside_first(given.cluster)


def inside_first(cluster: Cluster) -> bool:
    """Whether two devices of one node talk over a quicker link than any two of different ones."""
    inside, joining = cluster.inside, (cluster.between, *(level.link for level in cluster.levels))
    return all(link.bandwidth < inside.bandwidth and link.latency >= inside.latency for link in joining)


def kept(given: Problem, plan: Plan, draw: random.Random) -> dict[str, str]:
    """By device of a plan one that takes its place, at random, such that each TP group lies in a node: idle
    devices too, and the largest shares on the fastest. As it is where the groups drawn first leave no room."""
    usable = {node.name: [device.name for device in node.devices] for node in given.cluster.nodes}
    free = {node: draw.sample(names, len(names)) for node, names in usable.items()}
    free = {node: [name for name in names if name not in plan.carriers] for node, names in free.items()}
    stages = [stage for pipeline in plan.by_lane for stage in pipeline.stages]
    names: dict[str, str] = {}
    for stage in sorted(draw.sample(stages, len(stages)), key=lambda stage: -len(stage.devices)):
        width = len(stage.devices)
        roomy = [node for node in free if len(free[node]) >= width]
        if not roomy:
            return {}
        node = draw.choice(roomy)
        taken, free[node] = free[node][:width], free[node][width:]
        taken.sort(key=lambda name: rate_of(given.rates, name))
        seats = sorted(range(width), key=lambda at: -stage.shares[at])
        names |= {stage.devices[at]: name for at, name in zip(seats, taken, strict=True)}
    return names


def shuffled(plan: Plan, draw: random.Random) -> dict[str, str]:
    """By device of a plan the one that takes its place."""
    computing = list(plan.places)
    return dict(zip(computing, draw.sample(computing, len(computing)), strict=True))


def in_order(plan: Plan) -> dict[str, str]:
    """By device of a plan that of its shape when devices are dealt by name: the TP group innermost, then the
    pipelines, then the stages, as in torch's meshes of (pp, dp, tp)."""
    places = [
        (at, number, device)
        for number, pipeline in enumerate(plan.by_lane)
        for at, stage in enumerate(pipeline.stages)
        for device in stage.devices
    ]
    places.sort(key=lambda place: place[:2])
    ordered = sorted(
        (device for *_, device in places), key=lambda name: (node_of(name), int(name.rpartition("/")[2]))
    )
    return {device: name for (*_, device), name in zip(places, ordered, strict=True)}


def mapped(plan: Plan, names: dict[str, str]) -> Plan:
    """The plan's shape with other devices in the places."""
    (module,) = plan.modules
    pipelines = tuple(
        structs.replace(
            pipeline,
            stages=tuple(
                structs.replace(stage, devices=tuple(names.get(device, device) for device in stage.devices))
                for stage in pipeline.stages
            ),
        )
        for pipeline in module.pipelines
    )
    return plan.replace(
        strategies=(
            structs.replace(plan.strategies[0], modules=(structs.replace(module, pipelines=pipelines),)),
        ),
        idle=(),
        prediction=None,
    )


def seconds(given: Problem, plan: Plan) -> float:
    """The predicted seconds of a step; inf where a device has too little memory."""
    cost = ProfileCost(given.profile)
    if not fits(memory_by_device(plan, cost), given.cluster):
        return math.inf
    return step_seconds(plan, given.cluster, given.rates, cost.under(plan))
