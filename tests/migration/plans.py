"""A small model, and random plans for it, that together show every shape a layout can take."""

import random
from collections.abc import Sequence
from typing import Any

from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from elasticd_planner.spec.plan import (
    HeldExperts,
    ModulePlan,
    Pipeline,
    Plan,
    Stage,
    StatePolicy,
    Strategy,
)
from hypothesis import strategies as st
from msgspec import structs

DEVICES = tuple(f"n{node}/{local}" for node in range(3) for local in range(3))
LAYERS = 3
EXPERTS = 5


def _parameter(name: str, *shape: int, cut: tuple[int, str] | None = None, **rest: Any) -> Parameter:
    rule = Cut(dim=cut[0], units=cut[1]) if cut else None
    return Parameter(name=name, shape=shape, cut=rule, **{"dtype": "float32", **rest})


# Four query heads over two kv-heads: TP of three or four splits a kv group. The head is tied to the
# embedding; widths are mixed, one parameter has no dimensions, and one is large enough to be sent by itself.
# One is frozen in eight bits, there is a buffer, and plans may place experts.
SPEC = ModelSpec(
    name="tiny",
    embed=(_parameter("tokens.weight", 80, 160, cut=(0, "vocabulary")),),
    kinds=(
        (
            _parameter("norm.weight", 4, dtype="bfloat16"),
            _parameter("scale"),
            _parameter("q.weight", 32, 48, cut=(0, "heads")),
            _parameter("k.weight", 4, 4, cut=(0, "kv_heads"), replicas="add"),
            _parameter("o.weight", 48, 32, cut=(1, "heads"), dtype="float64"),
            _parameter("old.weight", 8, 6, cut=(0, "heads"), dtype="float8_e4m3fn", kind="frozen"),
            _parameter("down.weight", 3, 12, cut=(1, "columns")),
            _parameter("angles", 5, 2, kind="buffer"),
            _parameter("experts.up.weight", EXPERTS, 3, 2, cut=(0, "experts"), replicas="add", experts=True),
        ),
    ),
    layers=(0,) * LAYERS,
    head=(
        _parameter("norm.weight", 4, dtype="bfloat16"),
        _parameter("output.weight", 80, 160, cut=(0, "vocabulary")),
    ),
    units=(
        Units(kind="heads", count=4),
        Units(kind="kv_heads", count=2, follows="heads"),
        Units(kind="columns", count=6),
        Units(kind="vocabulary", count=8),
        Units(kind="experts", count=EXPERTS),
    ),
    ties=(("head.output.weight", "embed.tokens.weight"),),
    width=4,
)

Shape = list[tuple[int, list[tuple[str, int]]]]  # stages: number of layers, (device, share)


def plan(number: int, *pipelines: Shape, zero: int = 0, replicas: int | None = None, **rest: Any) -> Plan:
    """A plan with a pipeline for each list of (layers, [(device, share), ...])."""
    made = []
    for stages in pipelines:
        start, cut = 0, []
        for layers, group in stages:
            devices, shares = zip(*group, strict=True)
            cut.append(Stage(start=start, stop=start + layers, devices=devices, shares=shares))
            start += layers
        made.append(Pipeline(stages=tuple(cut), micro_batches=1))
    module = ModulePlan(module="model", pipelines=tuple(made))
    return Plan(
        number=number,
        strategies=(Strategy(modules=(module,)),),
        micro_batch=1,
        global_batch=len(made),
        state=StatePolicy(zero=zero, replicas=replicas),
        **rest,
    )


def with_experts(made: Plan, rng: random.Random) -> Plan:
    """The plan with experts placed in some blocks, each on one or two devices of the stage, whichever."""

    def held(stage: Stage) -> HeldExperts:
        own: list[list[int]] = [[] for _ in stage.devices]
        for expert in range(EXPERTS):
            for place in {rng.randrange(len(own)), rng.randrange(len(own))}:
                own[place].append(expert)
        return tuple(map(tuple, own))

    pipelines = tuple(
        structs.replace(
            pipeline,
            stages=tuple(
                structs.replace(
                    stage, experts=tuple(held(stage) if rng.random() < 0.7 else () for _ in range(stage.layers))
                )
                for stage in pipeline.stages
            ),
        )
        for pipeline in made.pipelines
    )
    return made.replace(strategies=(Strategy(modules=(structs.replace(made.module, pipelines=pipelines),)),))


def alone(device: str = "n0/0") -> Plan:
    """All on one device."""
    return plan(0, [(LAYERS, [(device, 1)])])


@st.composite
def plans(draw: st.DrawFn, number: int, least: int = 1) -> Plan:
    """Any number of pipelines, stages, TP widths and shares, over any of the devices in any order; any state
    policy with at least so many replicas, and carriers."""
    free = list(draw(st.permutations(DEVICES)))
    pipelines: list[Shape] = []
    for _ in range(draw(st.integers(1, 3))):
        stages: Shape = []
        left = LAYERS
        most = draw(st.integers(1, 3))
        while left:
            last = len(stages) == most - 1 or len(free) <= 3 - len(pipelines)
            layers = left if last else draw(st.integers(1, left))
            width = draw(st.integers(1, max(1, min(4, len(free) - 4))))
            stages.append((layers, [(free.pop(), draw(st.integers(1, 3))) for _ in range(width)]))
            left -= layers
        pipelines.append(stages)
    replicas = draw(st.integers(least, 4)) if least > 1 else draw(st.none() | st.integers(1, 4))
    zero = draw(st.sampled_from([1, 2])) if replicas else 0
    carriers = draw(st.sets(st.sampled_from(sorted(free)))) if zero and free else set()
    idle = tuple(device for device in free if device not in carriers)
    made = plan(number, *pipelines, zero=zero, replicas=replicas, carriers=tuple(sorted(carriers)), idle=idle)
    seed = draw(st.none() | st.integers(0, 99))
    return made if seed is None else with_experts(made, random.Random(seed))


def random_plan(seed: int, number: int, devices: Sequence[str]) -> Plan:
    """A plan on some of the devices without hypothesis, for processes of their own."""
    rng = random.Random(seed)
    free = rng.sample(devices, len(devices))
    pipelines: list[Shape] = []
    for _ in range(rng.randint(1, 2)):
        cuts = sorted(rng.sample(range(1, LAYERS), rng.randint(0, 1)))
        stages: Shape = []
        for start, stop in zip([0, *cuts], [*cuts, LAYERS], strict=True):
            width = min(rng.randint(1, 2), len(free) - 1)
            if width < 1:
                break
            stages.append((stop - start, [(free.pop(), rng.randint(1, 3)) for _ in range(width)]))
        if sum(layers for layers, _ in stages) == LAYERS:
            pipelines.append(stages)
    used = {device for stages in pipelines for _, group in stages for device, _ in group}
    replicas = rng.choice([None, 1, 2, 3])
    rest = [device for device in devices if device not in used]
    carriers = tuple(sorted(rng.sample(rest, min(1, len(rest))))) if replicas else ()
    made = plan(
        number,
        *pipelines,
        zero=rng.randint(1, 2) if replicas else 0,
        replicas=replicas,
        carriers=carriers,
        idle=tuple(device for device in rest if device not in carriers),
    )
    return with_experts(made, rng) if rng.random() < 0.5 else made
