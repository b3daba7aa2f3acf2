"""The planner's entry point: a problem in, the best plan or the reason why there is none out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

import msgspec
import numpy as np

from elasticd_planner.assign import EQUAL, split_micro_batches
from elasticd_planner.cluster import Node
from elasticd_planner.cost import (
    CostModel,
    ProfileCost,
    memory_by_device,
    pipeline_seconds,
    predict,
    rate_of,
    stage_seconds,
    step_seconds,
)
from elasticd_planner.exact import Combination, Exact
from elasticd_planner.placement import Outline, bytes_to_move, place, strategy
from elasticd_planner.plan import Pipeline, Plan
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.shortfall import explain
from elasticd_planner.value import refuse

#: The most devices that enumeration plans for.
EXACT_DEVICES = 8

#: Plans this close to the best (as a fraction) count as equal; the one that moves the fewest bytes is taken.
TOLERANCE = 0.005

#: Of near-equal plans, how many are placed and compared by bytes: of one combination, and in all.
COMPARED_EACH, COMPARED = 64, 400


def plan(problem: Problem, number: int = 0, tolerance: float = TOLERANCE) -> Answer:
    """The plan with the least step time; within `tolerance` of it, the one nearest to the current plan.
    A refusal says what does not fit and what would help."""
    usable = [d for d in problem.cluster.devices if math.isfinite(rate_of(problem.rates, d.name))]
    if not usable:
        return Answer(plan=None, refusal="no device to plan for: every device is dead; add a node")
    if len(usable) > EXACT_DEVICES:
        return Answer(
            plan=None,
            refusal=f"{len(usable)} devices: this planner enumerates plans for at most {EXACT_DEVICES}; "
            "give the job fewer nodes",
        )
    return _Planning(problem=problem, number=number, tolerance=tolerance).answer()


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
            units=self.problem.profile.share_units,
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
        return made.replace(prediction=predict(made, self.problem), reason=describe(made, self.problem))


def describe(plan: Plan, problem: Problem) -> str:
    """One sentence: the shape, where the slow devices are, who is idle."""
    pipelines = plan.modules[0].pipelines
    forms = []
    for pipeline in pipelines:
        stages = " + ".join(
            f"TP{len(s.devices)} x {s.layers} layer{'s' if s.layers > 1 else ''}"
            + (f" (shares {':'.join(map(str, s.shares))})" if len(set(s.shares)) > 1 else "")
            for s in pipeline.stages
        )
        forms.append(f"{stages} with {pipeline.micro_batches} micro-batches")
    text = f"{len(pipelines)} pipeline{'s' if len(pipelines) > 1 else ''}: {'; '.join(forms)}"
    slow = [name for name in plan.members if rate_of(problem.rates, name) > 1]
    if slow:
        text += "; slow: " + ", ".join(f"{name} {rate_of(problem.rates, name):g}x" for name in slow)
    if plan.idle:
        text += f"; idle: {', '.join(plan.idle)}"
    return text


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
