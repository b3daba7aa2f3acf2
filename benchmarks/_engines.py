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

import msgspec
from _results import Row, row
from elasticd_planner.problem import Answer, Problem
from elasticd_planner.problem_files.convert import problem_of
from elasticd_planner.search.planner import Planner

from tests.planner import jobs
from tests.planner.tables import small

#: Problems of each family that are drawn.
COUNT = 125
SIZES = (*jobs.SIZES, (7,), (8,), (8,), (4, 4), (4, 4), (6, 2), (5, 3), (3, 3, 2), (2, 2, 2), (2, 2, 2, 2))


def engine_rows(count: int = COUNT) -> Iterator[Row]:
    """Excess, refusals and processor seconds by family: jobs under the schedule's exact time with few different
    slowdowns and with many, and tables in units with equal shares and with uneven ones."""
    families: dict[str, Callable[[random.Random], Problem]] = {
        "jobs with few slowdowns": lambda rng: jobs.small(rng, SIZES),
        "jobs with many slowdowns": lambda rng: jobs.unlike(rng, SIZES),
        "tables, equal shares": lambda rng: _either(rng, problem_of(small(rng, SIZES))),
        "tables, uneven shares": lambda rng: _either(rng, problem_of(small(rng, SIZES, uneven=True))),
    }
    for family, drawn in families.items():
        rng = random.Random(21)
        cases = [drawn(rng) for _ in range(count)]
        exact = [_timed(lambda p=p: Planner(problem=p).answer()) for p in cases]  # type: ignore[misc]
        large = [_timed(lambda p=p: Planner(problem=p).wide()) for p in cases]  # type: ignore[misc]
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


def _either(rng: random.Random, problem: Problem) -> Problem:
    """The problem for a step, or for its steady state."""
    return msgspec.structs.replace(problem, objective="steady" if rng.random() < 0.5 else "step")


def _timed(work: Callable[[], Answer]) -> tuple[float, float]:
    """Seconds of a step (inf: refused), and of the processor."""
    start = time.process_time()
    plan = work().plan
    spent = time.process_time() - start
    return plan.prediction.step_seconds if plan is not None and plan.prediction is not None else math.inf, spent
