"""A small model that needs every rule, random plans of it, and what the cost model says of a plan."""

import math

import msgspec
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.model_profile import WORKING, ModelProfile, SectionProfile
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node, rate_of
from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Prediction, Stage, Strategy
from hypothesis import strategies as st

LAYERS = 3


def parameter(name: str, *shape: int, cut: tuple[int, str] | None = None, add: bool = False) -> Parameter:
    rule = Cut(dim=cut[0], units=cut[1]) if cut else None
    return Parameter(name=name, shape=shape, dtype="float32", cut=rule, replicas="add" if add else "same")


#: Four query heads over two kv-heads (TP of three or four splits one), a tied head, an uncut norm.
SPEC = ModelSpec(
    name="small",
    embed=(parameter("tokens.weight", 10, 8, cut=(0, "rows")),),
    kinds=(
        (
            parameter("norm.weight", 8),
            parameter("q.weight", 8, 8, cut=(0, "heads")),
            parameter("k.weight", 4, 8, cut=(0, "kv_heads"), add=True),
            parameter("o.weight", 8, 8, cut=(1, "heads")),
            parameter("up.weight", 12, 8, cut=(0, "columns")),
            parameter("down.weight", 8, 12, cut=(1, "columns")),
        ),
    ),
    layers=(0,) * LAYERS,
    head=(parameter("norm.weight", 8), parameter("output.weight", 10, 8, cut=(0, "rows"))),
    units=(
        Units(kind="heads", count=4),
        Units(kind="kv_heads", count=2, follows="heads"),
        Units(kind="columns", count=6),
        Units(kind="rows", count=5),
    ),
    ties=(("head.output.weight", "embed.tokens.weight"),),
    width=8,
)


def at_rest(profile: ModelProfile) -> ModelProfile:
    """The profile of a model between two steps, when no pass has anything besides what is kept."""
    none = dict.fromkeys(WORKING, 0.0)
    sections = {
        name: msgspec.structs.replace(getattr(profile, name), **none) for name in ("embed", "block", "head")
    }
    return msgspec.structs.replace(profile, **sections)


def cluster(*sizes: int, memory: int = 1 << 40, inside: Link | None = None) -> Cluster:
    """Nodes n0, n1, ... with so many devices."""
    return Cluster(
        nodes=tuple(
            Node(
                name=f"n{n}",
                devices=tuple(Device(name=f"n{n}/{i}", memory=memory) for i in range(size)),
            )
            for n, size in enumerate(sizes)
        ),
        inside=inside or Link(),
    )


def plan(*pipelines: tuple[int, list[tuple[int, list[str], list[int]]]], **rest: object) -> Plan:
    """Pipelines as (micro-batches, [(layers, devices, shares)])."""
    made = []
    for micro_batches, stages in pipelines:
        start = 0
        parts = []
        for layers, devices, shares in stages:
            parts.append(Stage(start=start, stop=start + layers, devices=tuple(devices), shares=tuple(shares)))
            start += layers
        made.append(Pipeline(stages=tuple(parts), micro_batches=micro_batches))
    return planned(*made, **rest)


def planned(*made: Pipeline, **rest: object) -> Plan:
    """A plan of these pipelines, with micro-batches of one sample."""
    total = sum(pipeline.micro_batches for pipeline in made)
    return Plan(
        number=int(str(rest.pop("number", 1))),
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=made),)),),
        micro_batch=1,
        global_batch=total,
        **rest,  # type: ignore[arg-type]
    )


@st.composite
def plans(draw: st.DrawFn, layers: int = LAYERS) -> Plan:
    """Any plan of SPEC on up to nine devices: unequal stages, widths to four, unequal shares, up to three
    lanes."""
    devices = draw(st.permutations([f"n{n}/{i}" for n in range(3) for i in range(3)]))
    pipelines = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2)))
        lanes = draw(st.sampled_from([1, 1, 2, 3]))
        stages = []
        for start, stop in zip([0, *cuts], [*cuts, layers], strict=True):
            widths = tuple(draw(st.integers(1, 4 if lanes == 1 else 2)) for _ in range(lanes))
            members, devices = tuple(devices[: sum(widths)]), devices[sum(widths) :]
            if len(members) < sum(widths):
                break
            shares = tuple(draw(st.integers(1, 9)) for _ in members)
            stages.append(Stage(start=start, stop=stop, devices=members, shares=shares, lanes=widths))
        else:
            rows = tuple(draw(st.integers(1, 4)) for _ in range(lanes))
            pipelines.append(Pipeline(stages=tuple(stages), micro_batches=sum(rows), rows=rows))
    return planned(*pipelines) if pipelines else plan((2, [(layers, ["n0/0"], [1])]))


def profile(**changes: object) -> ModelProfile:
    """Five layers of 80 ms a micro-batch, eight share units, a tied head."""
    values: dict[str, object] = {
        "name": "small",
        "layers": 5,
        "share_units": 8,
        "tokens": 256.0,
        "block": SectionProfile(seconds=0.08 / 256, cut_bytes=800_000, whole_bytes=1_000, collectives=4),
        "embed": SectionProfile(cut_bytes=100_000, collectives=1),
        "head": SectionProfile(seconds=0.01 / 256, cut_bytes=100_000, collectives=1),
        "tied_bytes": 100_000,
        "boundary_bytes": 512.0,
    }
    return ModelProfile(**{**values, **changes})  # type: ignore[arg-type]


def replica_bytes(model: ModelProfile) -> int:
    """Bytes of one whole replica's state: parameters, gradients and optimizer, without activations."""
    return round(model.parameter_bytes * model.state_factor)


def predict(made: Plan, problem: Problem) -> Prediction:
    """Step time, the harmonic bound and memory by device of a plan that was not searched."""
    cost = ProfileCost(problem.profile)
    rates = [rate_of(problem.rates, device.name) for device in problem.cluster.devices]
    return Prediction(
        step_seconds=step_seconds(made, problem.cluster, problem.rates, cost),
        bound_seconds=cost.bound(
            [rate for rate in rates if math.isfinite(rate)], problem.global_batch // problem.micro_batch
        ),
        memory=memory_by_device(made, cost),
    )
