"""The search beyond enumeration and its bounds, against oracles that share only the formulas with it."""

import math
import random

import pytest
from elasticd_planner.problem import Objective
from elasticd_planner.problem_files.convert import task_of
from elasticd_planner.problem_files.file_format import TableProblem
from elasticd_planner.problem_files.solve import solve
from elasticd_planner.search.large import LargeSearch

from tests import sizes
from tests.planner import table_brute
from tests.planner.table_exact import can_be_below
from tests.planner.tables import REFERENCE, golden, small

TINY = ((1,), (2,), (3,), (4,), (2, 2), (1, 3))
NINE = ((9,), (5, 4), (3, 3, 3), (8, 1), (6, 4), (4, 4, 2))
OBJECTIVES: tuple[Objective, ...] = ("step", "steady")

#: Searches end at this relative distance (pooled.CLOSE).
CLOSE = 2.5e-4


def found(problem: TableProblem, objective: Objective) -> float:
    figures = solve(problem, objective, ideal=False).figures
    if figures is None:
        return math.inf
    return figures.steady if objective == "steady" else figures.step


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("uneven", [False, True])
def test_the_exact_oracle_and_brute_force_agree(seed: int, uneven: bool) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        problem = small(rng, TINY, uneven=uneven)
        for objective in OBJECTIVES:
            least = table_brute.best(problem, objective)
            if math.isinf(least):
                assert not can_be_below(problem, 1e9, objective)
            else:
                assert not can_be_below(problem, least, objective)
                assert can_be_below(problem, least * (1 + 1e-5), objective)


@pytest.mark.parametrize("seed", sizes.every(range(4), 2))
def test_with_uneven_shares_the_bound_holds_and_few_devices_are_planned_as_brute_force_does(seed: int) -> None:
    rng = random.Random(50 + seed)
    for _ in range(8):
        problem = small(rng, (*TINY, (5,), (2, 3)), uneven=True)
        for objective in OBJECTIVES:
            least = table_brute.best(problem, objective)
            assert LargeSearch(task_of(problem, objective)).lower() <= least * (1 + 1e-9)
            assert found(problem, objective) == pytest.approx(least)


@pytest.mark.parametrize("seed", sizes.every(range(4), 4))
def test_just_beyond_enumeration_no_plan_is_better_and_none_that_fits_is_refused(seed: int) -> None:
    rng = random.Random(200 + seed)
    for _ in range(4):
        problem = small(rng, NINE, slow=0.12)
        for objective in OBJECTIVES:
            value = found(problem, objective)
            bound = LargeSearch(task_of(problem, objective)).lower()
            if math.isinf(value):
                assert not can_be_below(problem, 1e9, objective)
            else:
                assert bound <= value * (1 + 1e-9)
                assert not can_be_below(problem, bound, objective)
                assert not can_be_below(problem, value * (1 - CLOSE), objective)


@pytest.mark.parametrize(("name", "least"), [("70b", 660.0), ("110b", 668.5)])
def test_three_slow_devices_are_planned_as_well_as_is_known(name: str, least: float) -> None:
    """What the rows that the oracle takes half a minute for have reached: a shorter search loses it."""
    slow = {"n0/0": 2.57, "n1/0": 5.42, "n2/0": 12.53}
    assert found(golden(name, slow), "steady") <= least * (1 + 1e-6)


@pytest.mark.parametrize("row", REFERENCE["rows"], ids=lambda row: f"{row['problem']}-{row['rates']}")
def test_no_plan_has_a_smaller_steady_figure_than_a_golden_row(row: dict[str, object]) -> None:
    problem = golden(row["problem"], row["rates"])  # type: ignore[arg-type]
    if len(row["rates"]) == 3:  # type: ignore[arg-type]
        pytest.skip("takes half a minute: make bench NAME=planner")
    assert not can_be_below(problem, found(problem, "steady"), "steady")


def test_where_a_pipeline_takes_one_micro_batch_each_the_search_looks_at_as_many_pipelines() -> None:
    """The batch over its number of pipelines leaves the bound of fill and drain nothing to say."""
    rng = random.Random(0)
    problem = small(rng, ((9,),), slow=0.0)
    task = task_of(problem, "step")
    wide = LargeSearch(task)
    assert wide.bound(task.micro_batches, None) > 0
