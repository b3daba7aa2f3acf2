"""The layouts that `elasticd check` tries: small, and such that every kind of rule and of parallelism shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One way to train a step. recompute: all blocks make their activations again. gloo: members talk over
    sockets, as in a job; else through memory."""

    plan: Plan
    recompute: bool = False
    gloo: bool = False


def alone(spec: ModelSpec, samples: int) -> Variation:
    """One process, all samples in one micro-batch."""
    return Variation(plan=_plan([_pipeline(_stage(0, len(spec.layers), 0, (1,)))], samples))


def modules_alone(modules: Mapping[str, tuple[ModelSpec, str]], samples: int) -> Variation:
    """One process with all modules, all samples in one micro-batch.

    Args:
        modules: by name: the description of each, and what it takes of a sample; empty: it has the loss.
        samples: of the step.
    """
    listed = [
        ModulePlan(
            module=name,
            pipelines=(_pipeline(_stage(0, len(spec.layers), 0, (1,))),),
            items=items,
            trainable=any(parameter.kind == "trained" for parameter in spec.parameters.values()),
        )
        for name, (spec, items) in modules.items()
    ]
    own = next(module.module for module in listed if not module.items)
    edges = tuple(Edge(source=module.module, target=own) for module in listed if module.items)
    strategy = Strategy(modules=tuple(listed), edges=edges)
    return Variation(plan=Plan(number=1, strategies=(strategy,), micro_batch=samples, global_batch=samples))


def by_sample(spec: ModelSpec, samples: int) -> Variation:
    """One process, each sample in a micro-batch of its own."""
    stage = _stage(0, len(spec.layers), 0, (1,))
    return Variation(plan=_plan([_pipeline(stage, micro_batches=samples)], 1))


def layouts(spec: ModelSpec, samples: int) -> dict[str, Variation]:
    """Tensor and pipeline parallelism, by what is said of them."""
    layers, most = len(spec.layers), widest(spec)
    found: dict[str, Variation] = {}
    if most > 1:
        shares: tuple[int, ...] = (2, 1) if most > 2 else (1, 1)
        found[_tensor(shares)] = Variation(plan=_plan([_pipeline(_stage(0, layers, 0, shares))], samples))
    followers = [units.count for units in spec.units if units.follows is not None]
    wide = min(followers, default=most) + 1
    if 2 < wide <= min(most, 8):
        shares = (2 if most > wide else 1, *[1] * (wide - 1))
        found[f"{_tensor(shares)}: wider than the units that follow others"] = Variation(
            plan=_plan([_pipeline(_stage(0, layers, 0, shares))], samples)
        )
    if layers > 1:
        second = (1, 1) if most > 1 else (1,)
        said = f"2 stages of 1 and {layers - 1} layers" + (", the second with TP 2" if most > 1 else "")
        stages = _stage(0, 1, 0, (1,)), _stage(1, layers, 1, second)
        found[said] = Variation(plan=_plan([_pipeline(*stages)], samples))
    return found


def sliced(spec: ModelSpec, samples: int) -> dict[str, Variation]:
    """Sequence parallelism, where blocks are cut: compared with `alone`."""
    if widest(spec) == 1:
        return {}
    stage = _stage(0, len(spec.layers), 0, (2, 1) if widest(spec) > 2 else (1, 1))
    stage = msgspec.structs.replace(stage, sequence_parallel=True)
    return {f"{_tensor(stage.shares)}, sequence parallel": Variation(plan=_plan([_pipeline(stage)], samples))}


def others(spec: ModelSpec, samples: int) -> dict[str, Variation]:
    """The variations of a job that a model with right rules allows: compared with `alone`."""
    layers = len(spec.layers)
    found = {"recomputation in all blocks": Variation(plan=alone(spec, samples).plan, recompute=True)}
    if layers > 1:
        stages = _stage(0, layers - 1, 0, (1,)), _stage(layers - 1, layers, 1, (1,))
        plan = _plan([_pipeline(*stages)], samples)
        found[f"2 stages of {layers - 1} and 1 layers, over gloo"] = Variation(plan=plan, gloo=True)
    return found


def dealt(spec: ModelSpec, samples: int) -> dict[str, Variation]:
    """The variations that deal the samples to several micro-batches or replicas: compared with `by_sample`."""
    layers, found = len(spec.layers), dict[str, Variation]()
    if samples < 2:
        return found
    whole = [_pipeline(_stage(0, layers, i, (1,)), micro_batches=samples - 1 if i else 1) for i in range(2)]
    for zero in range(3):
        plan = _plan(whole, 1).replace(state=StatePolicy(zero=zero, replicas=1 if zero else None))
        found["data parallel 2" + (f", ZeRO {zero}" if zero else "")] = Variation(plan=plan)
    if layers > 3:
        stages = (
            Stage(start=0, stop=1, devices=("check/0",), shares=(1,), later=((2, 3),)),
            Stage(start=1, stop=2, devices=("check/1",), shares=(1,), later=((3, layers),)),
        )
        plan = _plan([_pipeline(*stages, micro_batches=samples)], 1)
        found["interleaved: 2 stages of 2 chunks"] = Variation(plan=plan)
    return found


def widest(spec: ModelSpec) -> int:
    """The largest width of a TP group: as many as the coarsest units that cut are; 1 where blocks are whole."""
    blocks = {p.cut.units for kind in spec.kinds for p in kind if p.cut is not None}
    edges = {p.cut.units for p in (*spec.embed, *spec.head) if p.cut is not None}
    leads = [spec.units_of(spec.units_of(kind).follows or kind).count for kind in blocks | edges]
    return min(leads) if blocks else 1


def _tensor(shares: tuple[int, ...]) -> str:
    return f"TP {len(shares)} with shares {':'.join(map(str, shares))}"


def _stage(start: int, stop: int, first: int, shares: tuple[int, ...]) -> Stage:
    devices = tuple(f"check/{first + i}" for i in range(len(shares)))
    return Stage(start=start, stop=stop, devices=devices, shares=shares)


def _pipeline(*stages: Stage, micro_batches: int = 1) -> Pipeline:
    return Pipeline(stages=stages, micro_batches=micro_batches)


def _plan(pipelines: list[Pipeline], micro_batch: int) -> Plan:
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=tuple(pipelines)),))
    samples = micro_batch * sum(pipeline.micro_batches for pipeline in pipelines)
    return Plan(number=1, strategies=(strategy,), micro_batch=micro_batch, global_batch=samples)
