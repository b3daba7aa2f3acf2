"""The enumeration that bounds plans of several modules: no plan of the module with the loss takes less."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from elasticd_planner.grouping.tp_groups import at_best, classes, groups
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search.exhaustive import ExhaustiveSearch
from elasticd_planner.search.options import task_of
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.cluster import Link

from tests.planner.drawn_module_problems import cluster_of, drawn_problem
from tests.sizes import number

SEEDS = range(1, number(40, 3))


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
def test_no_plan_beats_the_relaxed_enumeration_and_some_plan_is_near_it(seed: int) -> None:
    for pipelines in (1, 2, 3):
        problem = drawn(seed, pipelines)
        made = plan(problem).plan
        assert made is not None
        assert made.prediction is not None
        seconds, task = made.prediction.step_seconds, task_of(problem)
        exact = ExhaustiveSearch(
            replace(task, cost=task.cost.equal()), best=1.2 * seconds, relaxed=problem.profile.uneven
        )
        exact.run()
        assert exact.proved
        assert 0.9 * seconds <= exact.best <= seconds * (1 + 1e-9)


def test_no_shares_of_a_group_are_quicker_than_its_best() -> None:
    cluster, rates = cluster_of(1, 3), {"n0/1": 1.7, "n0/2": 3.1}
    problem = msgspec.structs.replace(drawn_problem(1), cluster=cluster, rates=rates, modules=())
    task = task_of(problem)
    alike = classes(cluster, rates)
    for group in groups(alike, cluster, task.cost.equal()):
        slowdowns = [alike[index].rate for index, _ in group.members]
        link, units = cluster.within or cluster.inside, range(1, 9)
        blocks = [
            task.cost.group(slowdowns, shares, link).block
            for shares in product(units, repeat=group.width)
            if sum(shares) == 8
        ]
        assert at_best(group, alike).cost.block <= min(blocks) * (1 + 1e-9)


def test_a_plan_of_few_devices_that_are_alike_is_proved() -> None:
    problem = msgspec.structs.replace(drawn(1), rates={})
    made = plan(problem).plan
    assert made is not None
    assert made.prediction is not None
    assert made.prediction.gap == pytest.approx(0.0, abs=1e-9)
