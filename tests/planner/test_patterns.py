"""Clusters as they are: many mildly unlike devices, slow nodes. More of these in `make bench NAME=planner`."""

import math

import pytest
from elasticd_planner.problem_files.file_format import Planned
from elasticd_planner.problem_files.solve import solve

from tests import sizes
from tests.planner.patterns import PATTERNS, Drawn, drawn, with_shares
from tests.planner.table_exact import can_be_below
from tests.planner.test_solve import check

#: One problem of every cell of patterns, objectives and shares.
CELLS = 16


def value(planned: Planned) -> float:
    if planned.figures is None:
        return math.inf
    return planned.figures.steady if planned.objective == "steady" else planned.figures.step


def test_as_many_are_drawn_of_each_pattern_and_again_the_same() -> None:
    listed = list(drawn(3, 3 * CELLS))
    assert [each.name for each in listed] == [each.name for each in drawn(3, 3 * CELLS)]
    assert [each.problem.rates for each in listed] == [each.problem.rates for each in drawn(3, 3 * CELLS)]
    assert {each.pattern for each in listed} == set(PATTERNS)
    clusters = {(each.pattern, each.objective, each.uneven, each.name.split()[0]) for each in listed}
    assert len(clusters) == 3 * CELLS


@pytest.mark.parametrize("each", sizes.every(list(drawn(2, 2 * CELLS)), 24, 7), ids=lambda each: each.name)
def test_a_drawn_problem_has_a_plan_and_uneven_shares_make_none_worse(each: Drawn) -> None:
    planned = solve(each.problem, each.objective, ideal=False)
    check(each.problem, planned)
    if each.uneven:
        equal = solve(with_shares(each.problem, uneven=False), each.objective, ideal=False)
        assert value(planned) <= value(equal) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("number", "limit"), sizes.beside([(357, 635.0)], [(192, 374.0), (357, 635.0), (360, 650.0)])
)
def test_slow_nodes_whose_memory_all_plans_need_are_divided_as_well_as_others(
    number: int, limit: float
) -> None:
    *_, each = drawn(254208, number + 1)
    problem = with_shares(each.problem, uneven=False)
    assert can_be_below(problem, limit, each.objective)
    assert value(solve(problem, each.objective, ideal=False)) < limit
