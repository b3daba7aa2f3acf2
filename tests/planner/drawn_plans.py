"""Plans drawn at random: uneven TP, lanes, unlike pipelines, interleaved ones, ZeRO with carriers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, StatePolicy, Strategy

from tests.migration.plans import SPEC as _SPEC

LAYERS = 12
#: The model of `tests.migration.plans` with more blocks.
MIXTURE: ModelSpec = msgspec.structs.replace(_SPEC, layers=(0,) * LAYERS)
#: The same without experts.
SPEC: ModelSpec = msgspec.structs.replace(
    MIXTURE, kinds=(tuple(parameter for parameter in MIXTURE.kinds[0] if not parameter.experts),)
)
DEVICES = tuple(f"n{node}/{local}" for node in range(4) for local in range(4))


def drawn_plan(
    seed: int,
    *,
    layers: int = LAYERS,
    devices: Sequence[str] = DEVICES,
    micro_batches: int | None = None,
    carriers: bool = True,
) -> Plan:
    """A plan for a model of so many blocks, `SPEC` by default.

    Args:
        seed: of the plan.
        layers: blocks of the model.
        devices: those that it may use.
        micro_batches: of all pipelines together, at least 3; None: any number.
        carriers: whether some devices may carry state alone.
    """
    rng = random.Random(seed)
    free = rng.sample(devices, len(devices))
    count = rng.randint(1, 3)
    dealt = [rng.randint(1, 9) for _ in range(count)]
    if micro_batches is not None:
        dealt = _divided(rng, micro_batches, count)
    pipelines = [
        _pipeline(rng, free, len(free) // (count - number), layers, dealt[number]) for number in range(count)
    ]
    replicas = rng.choice([None, 1, 2, 3])
    carrying: tuple[str, ...] = ()
    if replicas and carriers:
        carrying = tuple(sorted(rng.sample(free, min(len(free), rng.randint(0, 2)))))
    return Plan(
        number=1,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=tuple(pipelines)),)),),
        micro_batch=1,
        global_batch=sum(dealt),
        state=StatePolicy(zero=rng.randint(1, 2) if replicas else 0, replicas=replicas),
        carriers=carrying,
        idle=tuple(sorted(set(free) - set(carrying))),
    )


def _pipeline(rng: random.Random, free: list[str], most: int, layers: int, micro_batches: int) -> Pipeline:
    """Takes at most `most` devices off the free ones."""
    lanes = rng.randint(2, 3) if rng.random() < 0.3 else 1
    lanes = min(lanes, most, micro_batches)
    depth = rng.randint(1, min(4, most // lanes))
    widths = [[1] * lanes for _ in range(depth)]
    for _ in range(rng.randint(0, most - depth * lanes)):
        stage, lane = rng.randrange(depth), rng.randrange(lanes)
        widths[stage][lane] = min(4, widths[stage][lane] + 1)
    groups = []
    for width in widths:
        devices = tuple(free.pop() for _ in range(sum(width)))
        groups.append((devices, tuple(rng.randint(1, 3) for _ in devices)))
    chunks = rng.randint(1, layers // depth) if depth > 1 and rng.random() < 0.5 else 1
    spans = _divided(rng, layers, depth * chunks)
    made = Pipeline.from_layers(groups, spans[:depth], micro_batches).with_layers(spans)
    if lanes == 1:
        return made
    stages = tuple(
        msgspec.structs.replace(stage, lanes=tuple(width))
        for stage, width in zip(made.stages, widths, strict=True)
    )
    return Pipeline(stages=stages, micro_batches=micro_batches, rows=tuple(_divided(rng, micro_batches, lanes)))


def _divided(rng: random.Random, total: int, parts: int) -> list[int]:
    """So many parts, none of them empty."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
