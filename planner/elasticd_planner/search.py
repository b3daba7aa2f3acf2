"""The planner's entry point: a problem in, the best plan or the reason why there is none out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

import msgspec
import numpy as np

from elasticd_planner import tight
from elasticd_planner.assign import EQUAL, split_micro_batches
from elasticd_planner.cluster import Node
from elasticd_planner.cost import (
    CostModel,
    memory_by_device,
    pipeline_seconds,
    rate_of,
    stage_seconds,
    step_seconds,
)
from elasticd_planner.describe import describe
from elasticd_planner.exact import Combination, Exact
from elasticd_planner.finish import Finisher
from elasticd_planner.nearest import nearest
from elasticd_planner.placement import Outline, bytes_to_move, place, strategy
from elasticd_planner.plan import Pipeline, Plan
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.profiled import ProfileCost, predict
from elasticd_planner.shortfall import explain
from elasticd_planner.solve import EXACT_DEVICES
from elasticd_planner.task import Chained, Group, Task
from elasticd_planner.value import refuse
from elasticd_planner.wide import Wide

#: Plans this close to the best (as a fraction) count as equal; the one that moves the fewest bytes is taken.
TOLERANCE = 0.005

#: Of near-equal plans, how many are placed and compared by bytes: of one combination, and in all.
COMPARED_EACH, COMPARED = 64, 400


def plan(
    problem: Problem,
    number: int = 0,
    tolerance: float = TOLERANCE,
    stop: Callable[[], bool] | None = None,
) -> Answer:
    """The plan with the least step time; within `tolerance` of it, the one nearest to the current plan.
    Up to EXACT_DEVICES devices the least of all; beyond, the best that the search finds, `stop` being asked now
    and then whether to end with that. A refusal says what does not fit and what would help."""
    usable = [d for d in problem.cluster.devices if math.isfinite(rate_of(problem.rates, d.name))]
    if not usable:
        return Answer(plan=None, refusal="no device to plan for: every device is dead; add a node")
    planning = _Planning(problem=problem, number=number, tolerance=tolerance)
    return planning.answer() if len(usable) <= EXACT_DEVICES else planning.wide(stop)


@dataclass(frozen=True, kw_only=True)
class _Planning:
    """One problem being planned."""

    problem: Problem
    number: int
    tolerance: float

    @property
    def cost(self) -> CostModel:
        return ProfileCost(self.problem.profile)

    @property
    def micro_batches(self) -> int:
        return self.problem.global_batch // self.problem.micro_batch

    def answer(self) -> Answer:
        current = self.current()
        known = self.seconds(current) if current is not None else math.inf
        exact = Exact(
            self.problem.cluster,
            self.problem.rates,
            self.cost,
            layers=self.problem.profile.layers,
            micro_batches=self.micro_batches,
            slack=self.tolerance if current is not None else 0.0,
            best=known if current is not None and self.fits(current) else math.inf,
        )
        combinations = exact.run()
        now = known if current is not None else None
        found = list(islice(self.candidates(exact, combinations, current), COMPARED))
        if not found:
            return Answer(
                plan=None, refusal=explain(self.problem), current_seconds=now, candidates=exact.candidates
            )
        best = min(self.seconds(candidate) for candidate in found)
        limit = best * (1 + (self.tolerance if current is not None else 0.0)) * (1 + EQUAL)
        near = [candidate for candidate in found if self.seconds(candidate) <= limit]
        chosen = min(near, key=self.distance) if current is not None else near[0]
        return Answer(plan=self.finished(chosen), current_seconds=now, candidates=exact.candidates + len(found))

    @property
    def task(self) -> Task:
        return Task(
            cluster=self.problem.cluster,
            rates=self.problem.rates,
            cost=self.cost,
            layers=self.problem.profile.layers,
            micro_batches=self.micro_batches,
        )

    def wide(self, stop: Callable[[], bool] | None) -> Answer:
        """The answer for any number of devices."""
        search = Wide(self.task, stop)
        found = search.run()
        finisher = Finisher(self.task)
        best = finisher.pipelines(found.pipelines) if found is not None else None
        current = self.current()
        now = self.seconds(current) if current is not None else None
        options = list(self._kept(current, finisher)) if current is not None else []
        if best is not None:
            near = nearest(best, search.kinds, self.problem.profile, self.problem.current)
            options += [self.made(near)]
        if not options:
            return Answer(
                plan=None, refusal=tight.explain(self.task), current_seconds=now, candidates=search.candidates
            )
        slack = self.tolerance if current is not None else 0.0
        limit = min(map(self.seconds, options)) * (1 + slack) * (1 + EQUAL)
        close = [option for option in options if self.seconds(option) <= limit]
        chosen = min(close, key=self.distance) if current is not None else close[0]
        return Answer(plan=self.finished(chosen), current_seconds=now, candidates=search.candidates)

    def _kept(self, current: Plan, finisher: Finisher) -> Iterator[Plan]:
        """The current plan, with other micro-batches, and with other layers on the same stages."""
        room = {device.name: device.memory for device in self.problem.cluster.devices}
        chains = [
            Chained(
                groups=tuple(
                    Group(devices=s.devices, shares=s.shares, memory=tuple(room[name] for name in s.devices))
                    for s in pipeline.stages
                ),
                micro_batches=pipeline.micro_batches,
            )
            for pipeline in current.modules[0].pipelines
        ]
        layered = finisher.pipelines(chains, keep=True)
        made = [current, self.split_again(current), self.made(layered) if layered is not None else None]
        yield from (plan for plan in made if plan is not None and self.fits(plan))

    def current(self) -> Plan | None:
        """The current plan, if it is one of this problem: its members alive, batch and layers equal."""
        plan = self.problem.current
        if plan is None or plan.modules[0].pipelines[0].layers != self.problem.profile.layers:
            return None
        alive = {
            device.name
            for device in self.problem.cluster.devices
            if math.isfinite(rate_of(self.problem.rates, device.name))
        }
        same = (plan.global_batch, plan.micro_batch) == (self.problem.global_batch, self.problem.micro_batch)
        return plan if same and alive.issuperset(plan.members) else None

    def candidates(
        self, exact: Exact, combinations: Sequence[Combination], current: Plan | None
    ) -> Iterator[Plan]:
        """Plans near the best: first those made from the current one, which move the least."""
        if current is not None and self.fits(current):
            yield current
            split = self.split_again(current)
            if split is not None and self.fits(split):
                yield split
        slack = self.tolerance if current is not None else 0.0
        limit = exact.best * (1 + slack) * (1 + EQUAL)
        for combination in combinations:
            options = [
                [
                    shape
                    for shape in exact.shapes[part]
                    if float(shape.seconds[m - 1]) <= limit - combination.after
                ]
                for part, m in zip(combination.parts, combination.micro_batches, strict=True)
            ]
            ranked = [
                sorted(shapes, key=lambda shape, m=m: float(shape.seconds[m - 1]))  # type: ignore[misc]
                for shapes, m in zip(options, combination.micro_batches, strict=True)
            ]
            for shapes in islice(product(*ranked), COMPARED_EACH):
                outlines = [
                    Outline(shape=shape, layers=shape.layers(self.problem.profile.layers, m), micro_batches=m)
                    for shape, m in zip(shapes, combination.micro_batches, strict=True)
                ]
                yield self.made(place(outlines, exact.alike, self.problem.profile, self.problem.current))

    def split_again(self, plan: Plan) -> Plan | None:
        """The same stages with the micro-batches divided anew: nothing moves."""
        curves = []
        for pipeline in plan.modules[0].pipelines:
            stages = stage_seconds(pipeline, self.problem.cluster, self.problem.rates, self.cost)
            counts = range(1, self.micro_batches + 1)
            curves.append(np.array([pipeline_seconds(stages, count) for count in counts]))
        given = split_micro_batches(curves, self.micro_batches)
        if given is None:
            return None
        return self.made(
            [
                msgspec.structs.replace(pipeline, micro_batches=count)
                for pipeline, count in zip(plan.modules[0].pipelines, given, strict=True)
            ]
        )

    def made(self, pipelines: Sequence[Pipeline]) -> Plan:
        used = {name for pipeline in pipelines for stage in pipeline.stages for name in stage.devices}
        return Plan(
            number=self.number,
            strategies=(strategy(pipelines),),
            micro_batch=self.problem.micro_batch,
            global_batch=self.problem.global_batch,
            idle=tuple(d.name for d in self.problem.cluster.devices if d.name not in used),
        )

    def seconds(self, plan: Plan) -> float:
        return step_seconds(plan, self.problem.cluster, self.problem.rates, self.cost)

    def fits(self, plan: Plan) -> bool:
        """Whether every member's memory suffices."""
        room = {device.name: device.memory for device in self.problem.cluster.devices}
        return all(size <= room[name] for name, size in memory_by_device(plan, self.cost).items())

    def distance(self, plan: Plan) -> tuple[int, bool, float]:
        """What near-equal plans are compared by: bytes to move, then whether anything changes, then seconds."""
        current = self.problem.current
        moved = bytes_to_move(self.problem.profile, current, plan)
        same = current is not None and plan.modules[0].pipelines == current.modules[0].pipelines
        return moved, not same, round(self.seconds(plan), 9)

    def finished(self, chosen: Plan) -> Plan:
        """The chosen plan with its number, prediction and reason."""
        made = self.made(chosen.modules[0].pipelines).replace(number=self.number)
        prediction = predict(made, self.problem)
        bound = min(max(prediction.bound_seconds, Wide(self.task).lower()), prediction.step_seconds)
        prediction = msgspec.structs.replace(prediction, bound_seconds=bound)
        return made.replace(prediction=prediction, reason=describe(made, self.problem.rates))


def without(problem: Problem, device: str) -> Problem:
    """The same problem with one device gone."""
    problem.cluster.device(device)  # refuses a name that is not there
    nodes = (
        Node(name=node.name, devices=tuple(d for d in node.devices if d.name != device))
        for node in problem.cluster.nodes
    )
    left = tuple(node for node in nodes if node.devices)
    if not left:
        refuse(f"device {device} is the only one of the cluster")
    return msgspec.structs.replace(
        problem,
        cluster=msgspec.structs.replace(problem.cluster, nodes=left),
        rates={name: rate for name, rate in problem.rates.items() if name != device},
    )


def ideal_ratio(rates: Iterable[float]) -> float:
    """N / sum(1 / x) over the rates of all devices: how much longer a step would take if the work could be
    divided perfectly. A yardstick, not a bound."""
    listed = list(rates)
    return len(listed) / sum(1 / rate for rate in listed)
