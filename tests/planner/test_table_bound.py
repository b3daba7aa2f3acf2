"""The bound of problems in units that counts whole layers and memory, against brute force."""

import math
import random

import pytest
from elasticd_planner.problem import Objective
from elasticd_planner.problem_files.convert import task_of
from elasticd_planner.search.bounds import table_bound
from elasticd_planner.search.large import LargeSearch

from tests import sizes
from tests.planner import table_brute
from tests.planner.tables import golden, small

TINY = ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (5,), (2, 3))
OBJECTIVES: tuple[Objective, ...] = ("step", "steady")


@pytest.mark.parametrize("seed", sizes.every(range(12), 6))
@pytest.mark.parametrize("uneven", [False, True])
def test_no_plan_is_below_it(seed: int, uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_bound, "WHOLE", 0.0)  # whole pipelines have a test of their own
    rng = random.Random(seed)
    for _ in range(20):
        problem = small(rng, TINY, uneven=uneven)
        for objective in OBJECTIVES:
            least = table_brute.best(problem, objective)
            if math.isfinite(least):
                # As if a worse plan were known: up to its value more may be shown, if it is true.
                found = LargeSearch(task_of(problem, objective)).lower(known=least * 1.5)
                assert found <= least * (1 + 1e-9)


def test_pipelines_must_hold_all_layers_so_that_slow_nodes_have_some() -> None:
    """32B in four pipelines: two slow nodes are half of the memory, and none of the speed."""
    slow = {f"n{node}/{i}": 12.53 for node in (0, 1) for i in range(8)}
    task = task_of(golden("32b", slow), "steady")
    assert LargeSearch(task).lower(known=1e4) > LargeSearch(task).lower() * 1.05
