"""Lanes: pipelines of equal borders joined into one, and the lanes of a pipeline taken apart again.

A lane is a data-parallel copy as a pipeline is, and is dealt micro-batches as a pipeline is. So a plan with
lanes takes the time and the memory of the plan that has each lane as a pipeline of its own (`apart`). The
search knows no lanes: it plans near the running plan taken apart, and what it finds is joined where lanes are
allowed. Joining changes no prediction: it is for what goes on between the lanes of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elasticd_planner.problem import Answer, Problem
from elasticd_planner.spec.plan import Pipeline, Plan, Span, Stage
from elasticd_planner.spec.plan_summary import describe


def apart(plan: Plan) -> Plan:
    """The same plan with each lane as a pipeline of its own; itself where each pipeline has one lane."""
    if plan.by_lane == plan.pipelines:
        return plan
    return plan.with_pipelines(plan.by_lane)


def joined(pipelines: Sequence[Pipeline], most: int) -> tuple[Pipeline, ...]:
    """Pipelines of a single lane joined with those of equal borders, in order, `most` lanes at most."""
    alike: dict[tuple[tuple[tuple[Span, ...], bool], ...], list[Pipeline]] = {}
    for pipeline in pipelines:
        borders = tuple((stage.chunks, stage.recompute) for stage in pipeline.stages)
        alike.setdefault(borders, []).append(pipeline)
    return tuple(_one(lanes[i : i + most]) for lanes in alike.values() for i in range(0, len(lanes), most))


def _one(lanes: Sequence[Pipeline]) -> Pipeline:
    if len(lanes) == 1:
        return lanes[0]
    rows = tuple(lane.micro_batches for lane in lanes)
    stages = zip(*(lane.stages for lane in lanes), strict=True)
    return Pipeline(stages=tuple(map(_stage, stages)), micro_batches=sum(rows), rows=rows)


def _stage(groups: Sequence[Stage]) -> Stage:
    """One stage of several. Experts that the running plan has placed are placed anew after the search."""
    return msgspec.structs.replace(
        groups[0],
        devices=tuple(device for group in groups for device in group.devices),
        shares=tuple(share for group in groups for share in group.shares),
        lanes=tuple(len(group.devices) for group in groups),
        experts=(),
        splits=(),
    )


def answer(problem: Problem, found: Answer) -> Answer:
    """The answer to a problem from that of one near the running plan taken apart. Where the running plan is the
    one that was found, its lanes stay as they are."""
    most, plan, current = problem.search_space.lanes, found.plan, problem.current
    if plan is None or most == 1:
        return found
    lanes = joined(plan.pipelines, most)
    if current is not None and current.by_lane == plan.pipelines and _widest(current) <= most:
        lanes = current.pipelines
    made = plan.with_pipelines(lanes)
    return msgspec.structs.replace(
        found, plan=made.replace(reason=describe(made, problem.rates, problem.packed))
    )


def _widest(plan: Plan) -> int:
    return max(len(pipeline.micro_batches_by_lane) for pipeline in plan.pipelines)
