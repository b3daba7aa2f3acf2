"""Regrouping: a plan's TP groups change while its step gets faster, and keep to what is allowed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search.planner import Planner
from elasticd_planner.search.refine import Refiner
from elasticd_planner.search.regroup import regrouped
from elasticd_planner.spec.cluster import Rates, node_of
from elasticd_planner.spec.plan import Pipeline, Plan

from tests.planner.models import cluster, plan, profile

#: A block of which two devices make one in little more than half the time.
MODEL = profile(layers=8)


def job(*nodes: int, rates: Rates | None = None, **pins: int) -> Problem:
    return Problem(
        cluster=cluster(*nodes),
        profile=MODEL,
        rates=rates or {},
        global_batch=4,
        micro_batch=1,
        search_space=SearchSpace(**pins),  # type: ignore[arg-type]
    )


def changed(problem: Problem, start: Plan) -> tuple[tuple[Pipeline, ...] | None, float, float]:
    """The pipelines after regrouping, and seconds of a step before and after it."""
    planning = Planner(problem=problem)

    def step_seconds(pipelines: Sequence[Pipeline]) -> float:
        some = planning.made(pipelines)
        return planning.task.seconds(some) if planning.fits(some) else math.inf

    pipelines = regrouped(planning.task, Refiner(planning.task), start.pipelines, step_seconds)
    before = step_seconds(start.pipelines)
    return pipelines, before, before if pipelines is None else step_seconds(pipelines)


def members(pipelines: Sequence[Pipeline]) -> list[str]:
    return sorted(name for pipeline in pipelines for stage in pipeline.stages for name in stage.devices)


def stages(*groups: tuple[int, Sequence[str]]) -> list[tuple[int, list[str], list[int]]]:
    return [(layers, list(names), [1] * len(names)) for layers, names in groups]


def test_idle_devices_are_used_where_that_makes_the_step_faster() -> None:
    start = plan((4, stages((4, ["n0/0"]), (4, ["n0/1"]))), idle=("n0/2", "n0/3"))
    pipelines, before, after = changed(job(4), start)
    assert pipelines is not None
    assert members(pipelines) == ["n0/0", "n0/1", "n0/2", "n0/3"]
    assert after < before / 1.5


def test_a_device_that_holds_up_its_group_leaves_it() -> None:
    start = plan((4, stages((8, ["n0/0", "n0/1", "n0/2"]))))
    pipelines, before, after = changed(job(3, rates={"n0/2": 50.0}), start)
    assert pipelines is not None
    assert "n0/2" not in members(pipelines)
    assert after < before / 5


def test_groups_stay_in_their_nodes_and_a_pinned_size_stays() -> None:
    start = plan((4, stages((4, ["n0/0", "n0/1"]), (4, ["n1/0", "n1/1"]))), idle=("n1/2", "n1/3"))
    pipelines, before, after = changed(job(2, 4, fixed_tp=2, rates={"n1/3": 1.5}), start)
    assert pipelines is not None
    assert after < before
    for stage in (stage for pipeline in pipelines for stage in pipeline.stages):
        assert len(set(map(node_of, stage.devices))) == 1
        assert node_of(stage.devices[0]) == "n1" or len(stage.devices) == 2


@pytest.mark.parametrize("seed", range(8))
def test_the_number_of_pipelines_and_of_layers_and_micro_batches_stay(seed: int) -> None:
    rng = random.Random(seed)
    rates = {f"n{n}/{i}": rng.choice([1.0, 1.5, 3.0]) for n in range(2) for i in range(4)}
    start = plan(
        (2, stages((4, ["n0/0", "n0/1"]), (4, ["n0/2", "n0/3"]))),
        (2, stages((5, ["n1/0"]), (3, ["n1/1", "n1/2"]))),
        idle=("n1/3",),
    )
    pipelines, before, after = changed(job(4, 4, rates=rates), start)
    if pipelines is None:
        assert after == before
        return
    assert after < before
    assert len(pipelines) == 2
    assert sum(pipeline.micro_batches for pipeline in pipelines) == 4
    assert all(pipeline.layers == MODEL.layers for pipeline in pipelines)
    assert len(members(pipelines)) == len(set(members(pipelines)))
