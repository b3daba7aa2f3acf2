"""A model trained in some precision: under any plan, its members as threads, and in plain torch in one piece.

The plain loop is what people write by hand: a copy of the model in the low type, master weights beside it,
torch's own GradScaler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from elasticd_migration.local_state import MASTER, VALUE, LocalState
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan
from torch import Tensor, nn

from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads, unpaced
from elasticd.runtime.engine.engine import Engine, first_state
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.engine.parallelism import ParallelismOptions
from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.rng import Dropout, ModelRng
from tests.models.layouts import BATCH, SEED, Training

Optimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Course:
    """How `training` goes: its model in single precision, `whole` the same in one piece."""

    training: Training
    whole: nn.Module
    precision: Precision | None
    optimizer: Optimizer
    clip: float | None = 1.0

    def recipe(self) -> Recipe:
        made = self.training.recipe()
        return replace(
            made,
            optimizer=self.optimizer,
            parallelism=ParallelismOptions(precision=self.precision),
            clip=self.clip,
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses, the weights that the optimizer stepped on, which updates were made, the scale at the end."""

    losses: list[float]
    weights: Weights
    applied: list[bool]
    scale: float = 1.0


def engine_of(course: Course, plan: Plan, memory: MemoryPlanGroups, state: LocalState | None = None) -> Engine:
    recipe = course.recipe()  # its reader is one rank's
    layouts = Layouts(recipe.model.spec, plan)
    plan_groups = cast(PlanGroups, memory)
    engine = Engine(recipe, layouts, plan_groups, unpaced)
    engine.adopt(state or first_state(recipe.model, layouts, memory.me, SEED, recipe.master))
    return engine


def under(course: Course, plan: Plan) -> Trained:
    def worker(memory: MemoryPlanGroups) -> tuple[list[float], list[bool], float, LocalState]:
        engine = engine_of(course, plan, memory)
        done = [engine.step(i, lambda: 0).outcome for i in range(course.training.steps)]
        engine.settle()
        assert not any(p.grad is not None for _, p in engine.module.local.parameters.values())
        return [o.vote.loss for o in done], [o.vote.apply for o in done], engine.scale, engine.state()

    results = run_threads(plan.members, worker)
    losses, applied, scale, _ = results[plan.members[0]]
    for mine in results.values():
        assert str(mine[:3]) == str((losses, applied, scale)), "all ranks fold the same bits"
    layouts = Layouts(course.recipe().model.spec, plan)
    weights = together(layouts, {name: state for name, (*_, state) in results.items()})
    return Trained(losses=losses, weights=weights, applied=applied, scale=scale)


def together(layouts: Layouts, states: Mapping[str, LocalState]) -> Weights:
    """What the optimizer steps on, from all members' boxes, which must agree to the bit where they overlap; and
    values must be master weights, rounded."""
    values, masters = (whole_planes(layouts, states, plane) for plane in (VALUE, MASTER))
    assert set(values) == set(layouts.names)
    assert set(masters) in (set(), set(layouts.trained))
    for name, master in masters.items():
        assert torch.equal(values[name], master.to(values[name].dtype)), f"{name} is not its master weight"
    return masters or values


def whole_planes(layouts: Layouts, states: Mapping[str, LocalState], plane: str) -> Weights:
    """A plane of every parameter, put together from all members' boxes, which must agree where they overlap."""
    found: Weights = {}
    for state in states.values():
        for item, tensor in state.tensors.items():
            for shard in tensor.shards if item.role != "buffer" else ():
                if plane not in shard.planes:
                    continue
                value, shape = shard.planes[plane].cpu(), layouts.layout(item).shape
                whole = found.setdefault(item.name, torch.full(shape, torch.nan, dtype=value.dtype))
                held = whole[shard.box.slices(Box.whole(shape))]
                assert torch.equal(held[~held.isnan()], value[~held.isnan()]), f"holders of {item} differ"
                held.copy_(value)
    assert not any(whole.isnan().any() for whole in found.values())
    return found


def alone(course: Course) -> Trained:
    """Plain torch in one process, one batch a step; its dropouts are keyed as elasticd's are."""
    training, precision, drawing = course.training, course.precision, ModelRng()
    model = copy.deepcopy(course.whole)
    master = precision.master if precision is not None else torch.float32
    if precision is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(precision.compute)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.drawing = drawing
    weights = {n: nn.Parameter(p.detach().to(master, copy=True)) for n, p in course.whole.named_parameters()}
    update, scaler = course.optimizer(weights.items()), _scaler(precision)
    sampler, losses, applied = Sampler(size=len(training.dataset), global_batch=BATCH, seed=SEED), [], []
    for step in range(training.steps):
        samples = sampler.samples(step)
        drawing.begin(SEED, step)
        drawing.samples = samples
        batch = training.collate([training.dataset[i] for i in samples])
        with drawing.section("whole"):
            output = model({key: _as(value, precision) for key, value in batch.items()})
        total, count = training.loss(output.to(master), batch)
        model.zero_grad()
        scaler.scale(total).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            weights[name].grad = parameter.grad.to(master)
        scaler.unscale_(update)
        for weight in weights.values():
            assert weight.grad is not None
            weight.grad /= count
        if course.clip is not None:
            nn.utils.clip_grad_norm_(weights.values(), course.clip)
        finite = all(bool(w.grad.isfinite().all()) for w in weights.values() if w.grad is not None)
        scaler.step(update)
        scaler.update()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        losses.append(float(total.detach()) / count)
        applied.append(finite)
    found = {name: weight.detach() for name, weight in weights.items()}
    return Trained(losses=losses, weights=found, applied=applied, scale=float(scaler.get_scale()))


def _as(value: Any, precision: Precision | None) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(precision.compute) if floats and precision is not None else value


def _scaler(precision: Precision | None) -> torch.amp.GradScaler:
    if precision is None or precision.scale is None:
        return torch.amp.GradScaler("cpu", enabled=False)
    rules = precision.scale
    return torch.amp.GradScaler(
        "cpu",
        init_scale=rules.first,
        growth_factor=rules.growth,
        backoff_factor=rules.backoff,
        growth_interval=rules.interval,
    )


def apart(course: Course, found: Trained, expected: Trained) -> float:
    """How far the updates of all steps are apart, over how large they are (root of sums of squares)."""
    first = dict(course.whole.named_parameters())
    assert set(found.weights) == set(expected.weights)
    off = size = 0.0
    for name, weight in expected.weights.items():
        wide = weight.double()
        off += float((found.weights[name].double().reshape(-1) - wide.reshape(-1)).square().sum())
        size += float((wide - first[name].detach().double()).square().sum())
    return (off / size) ** 0.5 if size else off
