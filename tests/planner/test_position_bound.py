"""The bound by positions in a pipeline: below the best plan of each number of pipelines, and near it."""

from __future__ import annotations

import random

import msgspec
import pytest
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search.bounds.position_bound import PositionBound
from elasticd_planner.search.large import LargeSearch
from elasticd_planner.search.options import task_of
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Link

from tests.planner.drawn_module_problems import drawn_problem
from tests.sizes import number

SEEDS = range(1, number(40, 4))


def drawn(seed: int, pipelines: int | None = None) -> Problem:
    """A problem of one module whose links between nodes are as quick as others, or far slower."""
    rng, problem = random.Random(seed), drawn_problem(seed)
    between = Link(bandwidth=rng.choice((5e8, 5e9, 5e10)), latency=rng.choice((1e-5, 1e-3)))
    return msgspec.structs.replace(
        problem,
        modules=(),
        cluster=msgspec.structs.replace(problem.cluster, between=between),
        profile=msgspec.structs.replace(problem.profile, uneven=rng.random() < 0.5),
        search_space=SearchSpace(fixed_dp=pipelines),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_beats_the_bound_of_its_number_of_pipelines(seed: int) -> None:
    for pipelines in (1, 2, 3):
        problem = drawn(seed, pipelines)
        made = plan(problem).plan
        assert made is not None
        assert made.prediction is not None
        seconds = made.prediction.step_seconds
        task = task_of(problem)
        bound = PositionBound(task, LargeSearch(task).kinds)
        assert bound.least(pipelines, 0.0, 1.2 * seconds) <= seconds * (1 + 1e-9)


def test_it_is_near_the_plan_where_each_stage_has_few_layers() -> None:
    problem = msgspec.structs.replace(drawn_problem(2), modules=())
    made = plan(problem).plan
    assert made is not None
    assert made.prediction is not None
    seconds, task = made.prediction.step_seconds, task_of(problem)
    search = LargeSearch(task)
    bound = PositionBound(task, search.kinds)
    least = min(bound.least(number, 0.0, seconds) for number in range(1, 9))
    assert made.prediction.bound_seconds < 0.6 * seconds < 0.88 * seconds < least
