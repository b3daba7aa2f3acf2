"""Steps of an encoder beside a language model, made by hand, and the time of other ways to carry them out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
from elasticd_planner.cost.schedule import passes
from elasticd_planner.cost.schedule_timeline import one_f_one_b_seconds
from elasticd_planner.layout.module_order import module_pass_times
from elasticd_planner.layout.module_passes import ROWS
from elasticd_planner.spec.batch import batch_plan
from elasticd_planner.spec.item_batch import ItemBatch, SampleItem, item_batch
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, Strategy

from tests.planner.drawn_modules import LOSS, ModuleStep

#: Of a stage of the language model, and a backward pass in forward passes.
STAGE, BACKWARD = 1000, 2
ITEMS = "vision"


def stage(start: int, stop: int, device: str, forward: int) -> Stage:
    """One device, with these microseconds of a forward pass."""
    return Stage(
        start=start, stop=stop, devices=(device,), shares=(1,), microseconds=(forward, BACKWARD * forward)
    )


def colocated(
    depth: int,
    micro_batches: int,
    *,
    pipelines: int = 1,
    encoder: float = 1.0,
    images: Sequence[int] | None = None,
    slow: Sequence[int] = (),
    ahead: int = 1,
    lead: int = 0,
    trainable: bool = True,
) -> ModuleStep:
    """Pipelines of a language model with one device a stage, and an encoder on each of these devices.

    Args:
        depth: stages of each pipeline.
        micro_batches: of each pipeline, of one sample.
        pipelines: how many.
        encoder: forward pass of the rows of a micro-batch that has its mean number of images, in forward passes
            of a stage.
        images: of each sample; None: as many as stages.
        slow: by encoder lane its slowdown [64ths]; empty: all are normal.
        ahead: micro-batches that its passes run early.
        lead: micro-batches that it goes first.
        trainable: False: the encoder is frozen.
    """
    devices = [f"n{p}/{s}" for p in range(pipelines) for s in range(depth)]
    samples = micro_batches * pipelines
    images = images or [depth] * samples
    factors = slow or [64] * len(devices)
    rows = ROWS * samples // sum(images)  # of an image
    language = [
        Pipeline(
            stages=tuple(
                stage(s, s + 1, device, STAGE) for s, device in enumerate(devices[p * depth : (p + 1) * depth])
            ),
            micro_batches=micro_batches,
        )
        for p in range(pipelines)
    ]
    encoders = [
        Pipeline(stages=(stage(0, 1, device, int(encoder * STAGE * factor / 64)),), micro_batches=1)
        for device, factor in zip(devices, factors, strict=True)
    ]
    module = ModulePlan(
        module=ITEMS, pipelines=tuple(encoders), items="images", ahead=ahead, lead=lead, trainable=trainable
    )
    strategy = Strategy(
        modules=(module, ModulePlan(module=LOSS, pipelines=tuple(language))),
        edges=(Edge(source=ITEMS, target=LOSS),),
    )
    plan = Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=samples)
    batch = batch_plan(plan.view(LOSS), 0, range(samples))
    counts = dict(enumerate(images))
    known = {SampleItem(sample, number): rows for sample, count in counts.items() for number in range(count)}
    return ModuleStep(plan, {LOSS: batch, ITEMS: item_batch(plan, ITEMS, batch, counts, known, factors)})


def with_lead(step: ModuleStep, lead: int) -> ModuleStep:
    """The same step with another lead."""
    (strategy,) = step.plan.strategies
    modules = tuple(
        msgspec.structs.replace(module, lead=min(lead, module.ahead)) if module.items else module
        for module in strategy.modules
    )
    plan = step.plan.replace(strategies=(msgspec.structs.replace(strategy, modules=modules),))
    return ModuleStep(plan, step.batches)


def best_lead(step: ModuleStep, leads: Iterable[int] = (0, 1, 2)) -> ModuleStep:
    """The step with the lead that takes the least time."""
    return min((with_lead(step, lead) for lead in leads), key=microseconds)


def microseconds(step: ModuleStep, *, one_queue: bool = False) -> int:
    """The time of the step by its order."""
    times = module_pass_times(step.plan, step.batches, passes, one_queue=one_queue)
    return max(each.stop for each in times)


def most_kept(step: ModuleStep) -> int:
    """The most groups of items of a lane that are between forward and backward passes."""
    kept: dict[tuple[object, ...], int] = defaultdict(int)
    most = 0
    for act in step.order():
        if act.module == ITEMS and act.act.what == "pass":
            kept[act[:4]] += 1 if act.act.kind == "forward" else -1
            most = max(most, kept[act[:4]])
    return most


def encoder_loads(step: ModuleStep) -> list[int]:
    """Forward passes of each encoder lane, without waiting [us]."""
    found: dict[tuple[object, ...], int] = defaultdict(int)
    for each in module_pass_times(step.plan, step.batches, passes):
        if each.act.module == ITEMS and each.act.act.kind == "forward":
            found[each.act[:4]] += each.stop - each.start
    return list(found.values())


def three_phases(step: ModuleStep) -> float:
    """Megatron-LM's MIMO: the forward passes of all items, the largest first to the lane that is done first
    with it; then the pipelines; then the backward passes of all items [us]."""
    items = step.batches[ITEMS]
    assert isinstance(items, ItemBatch)
    costs = [group.rows // len(group.items) for _, group in items.walk() for _ in group.items]
    rates = [pipeline.stages[0].microseconds[0] / ROWS for pipeline in step.plan.view(ITEMS).pipelines]
    loads = [0.0] * len(rates)
    for cost in sorted(costs, reverse=True):
        lane = min(range(len(rates)), key=lambda lane: loads[lane] + cost * rates[lane])
        loads[lane] += cost * rates[lane]
    return (1 + BACKWARD) * max(loads) + language_alone(step)


def language_alone(step: ModuleStep) -> float:
    """The pipelines of the language model without an encoder [us]."""
    return max(map(_alone, step.plan.view(LOSS).pipelines))


def _alone(pipeline: Pipeline) -> float:
    return _pipeline_time([stage.microseconds[0] for stage in pipeline.stages], pipeline.micro_batches)


def _pipeline_time(forward: Sequence[float], micro_batches: int) -> float:
    return float(one_f_one_b_seconds(forward, [BACKWARD * time for time in forward], [], micro_batches))


def in_first_stage(step: ModuleStep, layers: int) -> float:
    """The encoder as a part of the first stage of each pipeline, with the best division of the language model,
    which has so many layers of equal time [us]."""
    items = step.batches[ITEMS]
    assert isinstance(items, ItemBatch)
    rate = step.plan.view(ITEMS).pipelines[0].stages[0].microseconds[0] / ROWS
    slowest = 0.0
    for p, pipeline in enumerate(step.plan.view(LOSS).pipelines):
        rows = sum(group.rows for _, group in items.walk() if group.pipeline == p)
        image, depth = rows * rate / pipeline.micro_batches, len(pipeline.stages)
        layer, times = depth * STAGE / layers, []
        for first in range(layers - depth + 2):
            cuts = [first + (layers - first) * s // (depth - 1) for s in range(depth)]
            forward = [first * layer + image, *((b - a) * layer for a, b in pairwise(cuts))]
            times.append(_pipeline_time(forward, pipeline.micro_batches))
        slowest = max(slowest, min(times))
    return slowest
