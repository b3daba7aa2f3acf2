"""One plan at work on one rank: its local model, optimizer and groups, and the step that they make.

A step: forward and backward of the pipeline's micro-batches, gradients reduced by holder set, the vote, the
optimizer. Losses and gradients are sums until the vote gives the global count; they are divided once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from elasticd_migration.state import VALUE, LocalState, LocalTensor, collect, install
from elasticd_planner.batch import Sampler, batch_plan
from elasticd_planner.layouts import Layouts
from elasticd_planner.measurement import Measurement
from elasticd_planner.plan import Plan
from elasticd_planner.reduction import Reduction, reductions
from elasticd_planner.rules import member_box
from torch import nn

from elasticd.runtime import tensor_parallel
from elasticd.runtime.data import Collate, Dataset, Loader, expected_hash
from elasticd.runtime.groups import Fabric, Group
from elasticd.runtime.model import LocalModel, Model
from elasticd.runtime.reduce import GradientReducer
from elasticd.runtime.stage import Loss, Pace, StageRunner
from elasticd.runtime.telemetry import Telemetry
from elasticd.runtime.vote import Outcome, Record, vote

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the user trains, the same under every plan. `clip` is the largest gradient norm, if any."""

    model: Model
    loss: Loss
    optimizer: MakeOptimizer
    dataset: Dataset
    collate: Collate
    sampler: Sampler
    clip: float | None = None


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of one device under one plan: all members, its TP group, and of the plan's
    reductions those that it takes part in."""

    everyone: Group
    tensor: Group
    holders: dict[tuple[str, ...], Group]
    reductions: tuple[Reduction, ...]


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A finished step: what was voted, the samples that were trained on, and what it cost here."""

    outcome: Outcome
    samples: tuple[int, ...]
    measurement: Measurement


def connect(fabric: Fabric, layouts: Layouts) -> Groups:
    """Makes all groups that `fabric.me` is in under the plan, in one order on all ranks."""
    plan, me = layouts.plan, fabric.me
    place = plan.places[me]
    team = plan.stage(place).devices
    mine = tuple(reduction for reduction in reductions(layouts) if me in reduction.devices)
    sets = [reduction.devices for reduction in mine if len(reduction.devices) > 1]
    for members in sorted({plan.members, team, *sets}, key=lambda m: [plan.rank(d) for d in m]):
        fabric.group(members, "")
    return Groups(
        everyone=fabric.group(plan.members, "vote"),
        tensor=fabric.group(team, "tensor"),
        holders={members: fabric.group(members, "reduce") for members in sets},
        reductions=mine,
    )


def build(model: Model, plan: Plan, device: str) -> LocalModel:
    """The local modules of a device, parameters not filled."""
    place = plan.places[device]
    return model.local(plan.stage(place), place.position)


def first_state(model: Model, local: LocalModel, seed: int) -> LocalState:
    """The state that a job starts from: every parameter's first value, no optimizer state yet."""
    return LocalState(
        tensors={
            name: LocalTensor(box=box, planes={VALUE: model.first_value(name, box, seed)}, scalars={})
            for name, (box, _) in local.parameters.items()
        }
    )


class Engine:
    """Trains one plan on one device, once `adopt` gave it its state and an optimizer."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        layouts: Layouts,
        local: LocalModel,
        fabric: Fabric,
        groups: Groups,
        pace: Pace,
    ) -> None:
        self.plan, self.device, self.local, self.fabric = layouts.plan, fabric.me, local, fabric
        self._recipe, self._groups = recipe, groups
        self._telemetry = Telemetry(self.device, fabric.stopwatch)
        self._reduce = GradientReducer(self.device, groups.reductions, groups.holders, local.parameters)
        if groups.tensor.size > 1:
            self._attach()
        self.runner = StageRunner(
            plan=self.plan,
            device=self.device,
            modules=local.modules,
            everyone=groups.everyone,
            dtype=recipe.model.dtype,
            loss=recipe.loss,
            loader=Loader(recipe.dataset, recipe.collate),
            telemetry=self._telemetry,
            stopwatch=fabric.stopwatch,
            pace=pace,
        )

    def _attach(self) -> None:
        model, stage = self._recipe.model, self.plan.stage(self.plan.places[self.device])
        for section, module in self.local.modules.items():
            rules = {rule.name: rule for rule in model.spec.section(section)}
            names = {id(sub): path for path, sub in module.named_modules()}
            for submodule, kind in model.communicating(section, module):
                rule = rules.get(f"{names[id(submodule)]}.weight")
                team = range(len(stage.devices))
                boxes = [member_box(model.spec, rule, stage.shares, i) for i in team] if rule else []
                tensor_parallel.attach(submodule, kind, self._groups.tensor, boxes)

    def adopt(self, state: LocalState) -> None:
        """Makes `state` that of the local model, and of an optimizer that the user's function makes now (and
        not before: a plan that is prepared may never come)."""
        self.optimizer = self._recipe.optimizer((n, p) for n, (_, p) in self.local.parameters.items())
        install(state, self.local.parameters, self.optimizer)

    def state(self) -> LocalState:
        """The parameters and optimizer state held here, by reference."""
        return collect(self.local.parameters, self.optimizer)

    @property
    def rank(self) -> int:
        return self.plan.rank(self.device)

    def step(self, step: int, prepared: Callable[[], int]) -> StepDone:
        """Trains step `step` (counted from 0). `prepared` is read once, as the vote's record is made."""
        self._telemetry.begin()
        batch = batch_plan(self.plan, step, self._recipe.sampler.samples(step))
        place = self.plan.places[self.device]
        passed = self.runner.run(batch.modules[place.module][place.pipeline])
        self._reduce()
        squares = self._reduce.squares()
        record = Record(
            step=step,
            prepared=prepared(),
            finite=math.isfinite(squares),
            tokens=passed.tokens,
            squares=squares,
            loss=passed.loss,
            count=passed.count,
            samples=passed.samples,
        )
        hashes = [[expected_hash(pipeline) for pipeline in module] for module in batch.modules]
        expected = [hashes[p.module][p.pipeline] for p in self.plan.places.values()]
        outcome = vote(self._groups.everyone, record, expected)
        self._groups.everyone.received()
        with self._telemetry.compute("optimizer"):
            self._update(outcome)
        measurement = self._telemetry.finish(self.plan.number, step)
        return StepDone(outcome=outcome, samples=batch.samples(), measurement=measurement)

    def _update(self, outcome: Outcome) -> None:
        """Divides the summed gradients by the global count, clips by the global norm, and steps."""
        scale = 1.0 / outcome.count
        if self._recipe.clip is not None:
            scale *= min(1.0, self._recipe.clip / (outcome.norm + 1e-6))
        if outcome.apply:
            for _, parameter in self.local.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            self.optimizer.step()
        self.optimizer.zero_grad()
