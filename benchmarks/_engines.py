"""Up to eight devices: the search for any number of devices beside the enumeration of every plan.

The planner enumerates so few devices (`search.exhaustive`). These rows say what it would lose without: how much
longer a step of the other search's plan takes, and the processor time of both.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator

from _results import Row, row
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.problem_files.convert import problem_of
from elasticd_planner.search.planner import Planner

from tests.planner import jobs
from tests.planner.tables import small

#: Problems of each family that are drawn.
COUNT = 125
SIZES = (*jobs.SIZES, (7,), (8,), (8,), (4, 4), (4, 4), (6, 2), (5, 3), (3, 3, 2), (2, 2, 2), (2, 2, 2, 2))

#: A problem, and whether the steady figure is minimised.
Case = tuple[Problem, bool]


def engine_rows(count: int = COUNT) -> Iterator[Row]:
    """Excess, refusals and processor seconds by family: jobs under the schedule's exact time with few different
    slowdowns and with many, and tables in units with equal shares and with uneven ones."""
    families: dict[str, Callable[[random.Random], Case]] = {
        "jobs with few slowdowns": lambda rng: (jobs.small(rng, SIZES), False),
        "jobs with many slowdowns": lambda rng: (jobs.unlike(rng, SIZES), False),
        "tables, equal shares": lambda rng: (problem_of(small(rng, SIZES)), rng.random() < 0.5),
        "tables, uneven shares": lambda rng: (problem_of(small(rng, SIZES, uneven=True)), rng.random() < 0.5),
    }
    for family, drawn in families.items():
        rng = random.Random(21)
        cases = [drawn(rng) for _ in range(count)]
        exact = [_timed(lambda p=p, s=s: Planner(problem=p, steady=s).answer()) for p, s in cases]  # type: ignore[misc]
        large = [_timed(lambda p=p, s=s: Planner(problem=p, steady=s).wide()) for p, s in cases]  # type: ignore[misc]
        pairs = list(zip((value for value, _ in exact), (value for value, _ in large), strict=True))
        excess = [ours / best - 1 for best, ours in pairs if math.isfinite(best) and math.isfinite(ours)]
        refused = sum(math.isfinite(best) and math.isinf(ours) for best, ours in pairs)
        words = f"{count} drawn {family}, up to 8 devices, the large search beside enumeration"
        yield row(f"{words}: mean excess of its plans", statistics.fmean(excess), "")
        yield row(f"{words}: worst excess", max(excess), "")
        yield row(f"{words}: refused, though a plan exists", refused, "problems")
        for name, made in (("the large search", large), ("enumeration", exact)):
            seconds = [spent for _, spent in made]
            yield row(f"{words}: processor of {name}, mean", statistics.fmean(seconds), "s")
            yield row(f"{words}: processor of {name}, largest", max(seconds), "s")


def _timed(work: Callable[[], Answer]) -> tuple[float, float]:
    """Seconds of a step (inf: refused), and of the processor."""
    start = time.process_time()
    plan = work().plan
    spent = time.process_time() - start
    return plan.prediction.step_seconds if plan is not None and plan.prediction is not None else math.inf, spent
