"""Runs a model under any plan, its members as threads of this process, and in plain torch in one piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from torch import Tensor, nn

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, MemoryWorld, run_threads, unpaced
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.data.collate import pad
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model
from elasticd.runtime.model.rng import Dropout, ModelRng

BATCH, SEED = 8, 3

Run = tuple[list[float], dict[str, Tensor]]


def stage(start: int, stop: int, *members: tuple[str, int]) -> Stage:
    return Stage(
        start=start, stop=stop, devices=tuple(d for d, _ in members), shares=tuple(s for _, s in members)
    )


def plan_of(*pipelines: tuple[int | tuple[int, ...], Sequence[Stage]], micro_batch: int = 1) -> Plan:
    """Pipelines as (micro-batches, or those of each lane; stages)."""
    rows = [count if isinstance(count, tuple) else (count,) for count, _ in pipelines]
    made = tuple(
        Pipeline(stages=tuple(stages), micro_batches=sum(own), rows=own)
        for own, (_, stages) in zip(rows, pipelines, strict=True)
    )
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=made),))
    batch = micro_batch * sum(map(sum, rows))
    return Plan(number=1, strategies=(strategy,), micro_batch=micro_batch, global_batch=batch)


def layouts_of(layers: int) -> dict[str, Plan]:
    """The kinds of layout that every model is tried under, for a model of so many layers."""
    half = layers // 2
    return {
        "replicas": plan_of(
            (5, [stage(0, layers, ("a/0", 1))]),
            (2, [stage(0, layers, ("a/1", 1))]),
            (1, [stage(0, layers, ("b/0", 1))]),
        ),
        "tp3 uneven beside a pipeline": plan_of(
            (5, [stage(0, layers, ("a/0", 3), ("a/1", 3), ("a/2", 2))]),
            (3, [stage(0, 1, ("b/0", 1)), stage(1, layers, ("b/1", 1))]),
        ),
        "tp1 to tp4 and back": plan_of(
            (
                4,
                [
                    stage(0, half, ("a/0", 1)),
                    stage(half, layers - 1, ("a/1", 4), ("a/2", 2), ("a/3", 1), ("b/0", 1)),
                    stage(layers - 1, layers, ("b/1", 2), ("b/2", 1)),
                ],
            ),
            micro_batch=2,
        ),
    }


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained: a model, its data and its loss; `options` of the recipe beside these."""

    model: Model
    loss: Callable[[Any, Any], tuple[Tensor, int]]
    dataset: Any
    collate: Callable[[Sequence[Any]], Any] = pad
    packing: Packing | None = None
    steps: int = 2
    batch: int = BATCH  # samples of a step
    options: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        return Recipe(
            model=self.model,
            loss=self.loss,
            optimizer=optimizer,
            dataset=self.dataset,
            global_batch=self.batch,
            seed=SEED,
            data=DataOptions(collate=self.collate, packing=self.packing),
            **self.options,
        )


def optimizer(named: Any) -> torch.optim.Optimizer:
    """Plain descent with momentum: an error of a gradient shows as it is."""
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def under(
    training: Training,
    plan: Plan,
    *,
    threads: bool = True,
    gloo: bool = False,
    after: Callable[[Engine], object] = lambda engine: None,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Run:
    """Losses, and weights put together from all members' boxes, which must agree where they overlap. A plan of
    one member can run on this thread. gloo: members talk over sockets, as in a job, else through memory. after:
    called on every member, after the last step. within: a member's thread runs in it."""
    layouts = Layouts(training.recipe().model.spec, plan)
    ended = threading.Barrier(len(plan.members))
    store = TorchStore(torch.distributed.HashStore())  # type: ignore[attr-defined]

    def worker(memory: MemoryPlanGroups) -> tuple[list[float], dict[str, list[tuple[Box, Tensor]]]]:
        recipe = training.recipe()  # its reader is one rank's
        plan_groups = PlanGroups("under", memory.me, "127.0.0.1", store) if gloo else cast(PlanGroups, memory)
        try:
            with within():
                return trained(memory.me, recipe, plan_groups)
        except BaseException:
            ended.abort()
            raise
        finally:
            if gloo:
                with suppress(threading.BrokenBarrierError):
                    ended.wait()  # nobody shuts what another one still reads
                plan_groups.shut()  # frees the others where this one failed
                plan_groups.park().join()

    def trained(
        me: str, recipe: Recipe, plan_groups: PlanGroups
    ) -> tuple[list[float], dict[str, list[tuple[Box, Tensor]]]]:
        engine = Engine(recipe, layouts, plan_groups, unpaced)
        engine.adopt(first_state(recipe.model, layouts, me, SEED, recipe.master))
        losses = [engine.step(i, lambda: 0, lambda: 0).outcome.vote.loss for i in range(training.steps)]
        after(engine)
        if gloo:
            engine.settle()
        return losses, {
            name: [(box, held.part(box).cpu()) for box in held.boxes]
            for name, held in engine.module.local.parameters.items()
        }

    if threads:
        results = run_threads(plan.members, worker)
    else:
        (me,) = plan.members
        results = {me: worker(MemoryPlanGroups(MemoryWorld(), me))}
    losses = results[plan.members[0]][0]
    weights: dict[str, Tensor] = {}
    for mine, parts in results.values():
        assert mine == losses, "all ranks fold the same bits"
        for name, box, value in ((name, *part) for name, own in parts.items() for part in own):
            shape = layouts.value(name).shape
            whole = weights.setdefault(name, torch.full(shape, torch.nan, dtype=value.dtype))
            held = whole[box.slices(Box.whole(shape))]
            assert torch.equal(held[~held.isnan()], value[~held.isnan()]), f"holders of {name} differ"
            held.copy_(value)
    assert set(weights) == set(layouts.names)
    return losses, weights


def alone(training: Training, whole: nn.Module) -> Run:
    """Plain torch over the user's own module, one batch a step; its dropouts are keyed as elasticd's are."""
    drawing = ModelRng()
    for module in whole.modules():
        if isinstance(module, Dropout):
            module.drawing = drawing
    update = optimizer(whole.named_parameters())
    sampler, losses = training.recipe().sampler, []
    for step in range(training.steps):
        samples = sampler.samples(step)
        drawing.begin(SEED, step)
        drawing.samples = samples
        batch = training.collate([training.dataset[i] for i in samples])
        with drawing.section("whole"):
            total, count = training.loss(whole(batch), batch)
        update.zero_grad()
        (total / count).backward()
        update.step()
        losses.append(float(total.detach()) / count)
    return losses, {name: p.detach() for name, p in whole.named_parameters()}


def furthest(found: Run, expected: Run, names: dict[str, str]) -> tuple[float, str]:
    """The largest difference of a weight, and its name. `names`: the user's, by elasticd's."""
    assert set(names) == set(found[1])
    gaps = {
        name: found[1][name].reshape(-1) - expected[1][theirs].reshape(-1) for name, theirs in names.items()
    }
    return max((float(gap.abs().max()), name) for name, gap in gaps.items())
