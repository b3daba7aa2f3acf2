"""Large jobs on paper: how long a schedule takes, and what one straggler's switch moves at 70B (simulated)."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from _results import Row, row
from elasticd_migration.reshard import bytes_lacking, reshard, whole_bytes
from elasticd_migration.rounds import schedule
from elasticd_migration.schema import Plane
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.problem import Problem
from elasticd_planner.search import planner
from elasticd_planner.search.options import task_of
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.simulator.scenarios.model_shapes import PRESETS, model_spec

SPEC = model_spec("llama-70b", PRESETS["llama-70b"])
#: bfloat16 weights; float32 master weights and two moments.
PLANES = {
    "value": (Plane(name="value", dtype="bfloat16", itemsize=2),),
    "state": tuple(Plane(name=n, dtype="float32", itemsize=4) for n in ("exp_avg", "exp_avg_sq", "master")),
}
#: The device that becomes slow.
SLOW = "n3/5"
BYTES = {role: sum(plane.itemsize for plane in planes) for role, planes in PLANES.items()}


def grid(
    number: int, pipelines: int, width: int, *, skip: int = 0, slow: tuple[int, int] | None = None
) -> Plan:
    """1,024 devices in pipelines of TP groups of one width, 80 layers; the first `skip` devices last; the last
    member of the stage `slow` has a smaller share."""
    names = [f"n{n}/{i}" for n in range(128) for i in range(8)]
    names = iter((*names[skip:], *names[:skip]))
    depth = 1024 // pipelines // width
    made = []
    for p in range(pipelines):
        stages = []
        for s in range(depth):
            shares = (64,) * (width - 1) + (40,) if (p, s) == slow else (1,) * width
            devices = tuple(next(names) for _ in range(width))
            stages.append(
                Stage(start=80 * s // depth, stop=80 * (s + 1) // depth, devices=devices, shares=shares)
            )
        made.append(Pipeline(stages=tuple(stages), micro_batches=4))
    return Plan(
        number=number,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=tuple(made)),)),),
        micro_batch=1,
        global_batch=4 * pipelines,
    )


def schedule_rows() -> Iterator[Row]:
    """From two plans to one rank's rounds, all that every rank does before a move."""
    before = grid(1, 16, 8)
    for name, after, limit in (
        ("one straggler", grid(2, 16, 8, slow=(3, 4)), 0.3),
        ("a full reshuffle", grid(2, 32, 4, skip=8), 3.0),
    ):
        spent = []
        for _ in range(3):
            start = time.perf_counter()
            planned(before, after, "n29/7")
            spent.append(time.perf_counter() - start)
        middle = statistics.median(spent)
        yield row(
            f"schedule of {name}, 1,024 devices x 80 layers",
            middle,
            "s",
            goal=f"<= {limit:g}",
            met=middle <= limit,
            noise=(max(spent) - min(spent)) / middle,
        )


def planned(before: Plan, after: Plan, me: str) -> None:
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    sizes = {item: BYTES[item.role] for item in new.items}
    transfers = reshard(old, new, sizes)
    schedule(transfers, {item: PLANES[item.role] for item in new.items}, me=me)


def straggler_rows() -> Iterator[Row]:
    """64 devices in 8 nodes train 70B, one becomes slow: what the planner's plan moves, and the least that any
    plan tried moves which is within 2 % of the best step time."""
    nodes = tuple(
        Node(name=f"n{n}", devices=tuple(Device(name=f"n{n}/{i}", memory=80_000_000_000) for i in range(8)))
        for n in range(8)
    )
    cluster = Cluster(
        nodes=nodes, inside=Link(bandwidth=300e9, latency=1e-5), between=Link(bandwidth=50e9, latency=2e-5)
    )
    problem = Problem(cluster=cluster, profile=derive(SPEC, 4096, 1), global_batch=64, micro_batch=1)
    healthy = planner.plan(problem, 1).plan
    assert healthy is not None
    slow = msgspec.structs.replace(problem, rates={SLOW: 2.57})
    best = planner.plan(slow, 2).plan
    chosen = planner.plan(msgspec.structs.replace(slow, current=healthy), 2, tolerance=0.02).plan
    assert chosen is not None
    assert best is not None
    cost = task_of(slow).cost

    def seconds(plan: Plan) -> float:
        return step_seconds(plan, cluster, slow.rates, cost)

    def moved(plan: Plan) -> int:
        old, new = Layouts(SPEC, healthy), Layouts(SPEC, plan)
        return sum(bytes_lacking(old, new, {item: BYTES[item.role] for item in new.items}).values())

    limit = min(seconds(best), seconds(chosen)) * 1.02  # at least: a plan that is tried may be better yet
    whole = whole_bytes(Layouts(SPEC, healthy), {i: BYTES[i.role] for i in Layouts(SPEC, healthy).items})
    others = {p.strategies: p for p in (*lightened(healthy, SLOW), *varied(chosen, best, healthy))}  # each once
    close = [other for other in others.values() if seconds(other) <= limit]
    least = min([moved(chosen), *map(moved, close)])
    part = moved(chosen) / whole
    yield row(
        "70B, one straggler of 64: bytes of the switch over the whole state",
        part,
        "",
        goal="< 0.25",
        met=part < 0.25,
        kind="simulated",
    )
    over = moved(chosen) / max(1, least)
    yield row(
        f"70B, one straggler: its bytes over the least of the {len(close)} plans within 2 % of the best, "
        f"of {len(others)} tried",
        over,
        "",
        goal="<= 1",
        met=over <= 1 + 1e-9,
        kind="simulated",
    )


def lightened(plan: Plan, slow: str) -> Iterator[Plan]:
    """The plan with a smaller share for one device of a group, layers given to or taken from its stage, and a
    micro-batch fewer in its pipeline or not."""
    pipelines = list(plan.pipelines)
    p, s = next(
        (p, s)
        for p, line in enumerate(pipelines)
        for s, stage in enumerate(line.stages)
        if slow in stage.devices
    )
    stage = pipelines[p].stages[s]
    position, width = stage.devices.index(slow), len(stage.devices)
    units = 8 * width  # heads of the model on a group of eight
    for share, layers, fewer in itertools.product(range(1, 9), range(-2, 3), range(3)):
        rest = [(units - share) // (width - 1) + (i < (units - share) % (width - 1)) for i in range(width - 1)]
        shares = (*rest[:position], share, *rest[position:])
        stages = list(pipelines[p].stages)
        stages[s] = _stage(stage, shares=shares)
        other = s - 1 if s else s + 1
        first, second = sorted((s, other))
        if len(stages) > 1 and stages[first].start < stages[first].stop + layers < stages[second].stop:
            border = stages[first].stop + layers
            stages[first] = _stage(stages[first], stop=border)
            stages[second] = _stage(stages[second], start=border)
        changed = _with(pipelines, p, stages)
        if changed[p].micro_batches <= fewer:
            continue
        for k in range(fewer):  # to the others in turn
            q = (p + 1 + k) % len(changed)
            changed[p] = Pipeline(stages=changed[p].stages, micro_batches=changed[p].micro_batches - 1)
            changed[q] = Pipeline(stages=changed[q].stages, micro_batches=changed[q].micro_batches + 1)
        yield plan.replace(strategies=(_strategy(plan, changed),), prediction=None)


def _strategy(plan: Plan, pipelines: Sequence[Pipeline]) -> Strategy:
    module = ModulePlan(module=plan.modules[0].module, pipelines=tuple(pipelines))
    return Strategy(modules=(module,))


def varied(*plans: Plan) -> Iterator[Plan]:
    """The plans and many near them: layers moved between neighbours, micro-batches between pipelines, devices
    exchanged, shares changed."""
    rng = random.Random(1)
    changes: tuple[Callable[[random.Random, list[Pipeline]], list[Pipeline]], ...] = (
        _layer,
        _micro_batch,
        _devices,
        _share,
    )
    for plan in plans:
        yield plan
        for _ in range(400):
            pipelines = list(plan.pipelines)
            for _ in range(rng.randint(1, 3)):
                pipelines = rng.choice(changes)(rng, pipelines)
            try:
                yield plan.replace(strategies=(_strategy(plan, pipelines),), prediction=None)
            except ValueError:
                continue  # a change that makes no plan


def _with(pipelines: list[Pipeline], p: int, stages: list[Stage]) -> list[Pipeline]:
    changed = Pipeline(stages=tuple(stages), micro_batches=pipelines[p].micro_batches)
    return [*pipelines[:p], changed, *pipelines[p + 1 :]]


def _stage(stage: Stage, **changes: object) -> Stage:
    fields = {name: getattr(stage, name) for name in stage.__struct_fields__}
    return Stage(**{**fields, **changes})  # type: ignore[arg-type]


def _layer(rng: random.Random, pipelines: list[Pipeline]) -> list[Pipeline]:
    p = rng.randrange(len(pipelines))
    stages = list(pipelines[p].stages)
    if len(stages) < 2:
        return pipelines
    s, by = rng.randrange(len(stages) - 1), rng.choice((-1, 1))
    border = stages[s].stop + by
    if not stages[s].start < border < stages[s + 1].stop:
        return pipelines
    stages[s : s + 2] = [_stage(stages[s], stop=border), _stage(stages[s + 1], start=border)]
    return _with(pipelines, p, stages)


def _micro_batch(rng: random.Random, pipelines: list[Pipeline]) -> list[Pipeline]:
    if len(pipelines) < 2:
        return pipelines
    a, b = rng.sample(range(len(pipelines)), 2)
    if pipelines[a].micro_batches < 2:
        return pipelines
    made = list(pipelines)
    for index, by in ((a, -1), (b, 1)):
        made[index] = Pipeline(
            stages=pipelines[index].stages, micro_batches=pipelines[index].micro_batches + by
        )
    return made


def _devices(rng: random.Random, pipelines: list[Pipeline]) -> list[Pipeline]:
    names = [name for line in pipelines for stage in line.stages for name in stage.devices]
    a, b = rng.sample(names, 2)
    swap = {a: b, b: a}
    return [
        Pipeline(
            stages=tuple(
                _stage(stage, devices=tuple(swap.get(name, name) for name in stage.devices))
                for stage in line.stages
            ),
            micro_batches=line.micro_batches,
        )
        for line in pipelines
    ]


def _share(rng: random.Random, pipelines: list[Pipeline]) -> list[Pipeline]:
    p = rng.randrange(len(pipelines))
    stages = list(pipelines[p].stages)
    s = rng.randrange(len(stages))
    shares = list(stages[s].shares)
    shares[rng.randrange(len(shares))] += rng.choice((-1, 1))
    if min(shares) < 1:
        return pipelines
    stages[s] = _stage(stages[s], shares=tuple(shares))
    return _with(pipelines, p, stages)
