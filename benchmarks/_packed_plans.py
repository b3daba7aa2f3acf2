"""Packed plans of drawn jobs on 7 to 16 GPUs (tests/planner/packed_jobs.py): processor seconds of a search, and
its plan beside those with the size of TP groups pinned.

    make bench NAME=planner ARGS="--only packed"         # of jobs nobody has seen; the rows name their seed
    make bench NAME=planner ARGS="--only packed --seed 5" # those of a run whose rows name this seed
"""

from __future__ import annotations

import math
import secrets
import statistics
import time
from collections.abc import Iterator

from _results import Row, row
from elasticd_planner.problem import Problem
from elasticd_planner.search.planner import plan

from tests.planner.packed_jobs import drawn, pinned

#: Jobs, and below which number a seed is.
COUNT, SEEDS = 40, 1_000_000
#: TP sizes that are pinned.
WIDTHS = (1, 2, 4, 8)


def packed_rows(seed: int | None = None, count: int = COUNT) -> Iterator[Row]:
    """Rows of the drawn packed jobs. seed: None for a fresh one."""
    seed = secrets.randbelow(SEEDS) if seed is None else seed
    words = f"{count} drawn packed jobs of 7 to 16 devices, seed {seed}"
    processor: dict[bool, list[float]] = {True: [], False: []}
    refusals, refused, worst = list[float](), 0, 0.0
    for job in drawn(seed, count):
        began = time.process_time()
        free = _seconds(job.problem)
        seconds = time.process_time() - began
        least = min(_seconds(pinned(job, width)) for width in WIDTHS)
        if not math.isfinite(free):
            refusals.append(seconds)
            refused += math.isfinite(least)
            continue
        processor[job.slow > 0].append(seconds)
        worst = max(worst, free / least)
    for slow, listed in processor.items():
        which = "with a slow device" if slow else "healthy"
        if listed:
            yield row(f"{words}, {which}: processor, median", statistics.median(listed), "s")
            yield row(
                f"{words}, {which}: processor, largest", max(listed), "s", goal="<= 2", met=max(listed) <= 2
            )
    if refusals:
        yield row(f"{words}: processor of a refusal, largest of {len(refusals)}", max(refusals), "s")
    yield row(
        f"{words}: free over the best with its TP size pinned, worst",
        worst,
        "",
        goal="<= 1",
        met=worst <= 1 + 1e-9,
    )
    yield row(f"{words}: refused, though a pin has a plan", refused, "jobs", goal="<= 0", met=refused == 0)


def _seconds(problem: Problem) -> float:
    """The step's seconds; infinite where there is no plan."""
    found = plan(problem).plan
    return math.inf if found is None or found.prediction is None else found.prediction.step_seconds
