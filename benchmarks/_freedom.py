"""More freedom makes no plan worse: drawn jobs of real models beside the same jobs with less freedom, and the
time that a free search takes.

    make bench NAME=planner ARGS="--only freedom real"

What is drawn is of a fresh seed each time, which the rows name (tests/planner/freedom.py): a model, healthy
nodes or some slow devices, links, memory, batch, what the search may choose; and restrictions: pins, fewer
settings, fewer nodes, a device left out. Seconds are of the processor.
"""

from __future__ import annotations

import math
import random
import secrets
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from _results import Row, row
from elasticd_planner.problem import Problem
from elasticd_planner.search.planner import plan

from tests.planner.freedom import FEW, MANY, drawn, restricted
from tests.planner.real_models import REAL, job

SEEDS = 1_000_000

#: Processor seconds that a free search of a real model may take, by number of devices.
GOALS = {64: 1.0, 1024: 3.0}

#: Two slow devices on two nodes of 64 devices, and the models that are planned with them.
SLOW = {"n1/3": 2.5, "n4/0": 1.7}
SLOW_MODELS = ("SmolLM2-135M", "Gemma-3-1b", "Llama-3.1-8B")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One job: its plan's seconds over those of each restricted plan, and the processor seconds of a search."""

    ratios: list[float]
    searched: float

    @property
    def worst(self) -> float:
        """The plan's seconds over those of the best restricted plan; 1 where none of these has a plan."""
        return max(self.ratios, default=1.0)


def judged(rng: random.Random, problem: Problem, count: int) -> Judged:
    """The job beside so many restricted ones."""
    free, searched = _planned(problem)
    others = [_planned(one.problem)[0] for one in restricted(rng, problem, count)]
    return Judged(ratios=[free / other for other in others if math.isfinite(other)], searched=searched)


def _planned(problem: Problem) -> tuple[float, float]:
    """Seconds of a step under the job's plan (inf: it has none), and of the search."""
    start = time.process_time()
    made = plan(problem).plan
    searched = time.process_time() - start
    if made is None:
        return math.inf, searched
    assert made.prediction is not None
    return made.prediction.step_seconds, searched


def freedom_rows(
    few: int = 60, many: int = 6, restrictions: int = 30, seed: int | None = None
) -> Iterator[Row]:
    """Jobs on 2 to 16 devices, healthy and with slow devices, and on 32 to 1,024 healthy ones."""
    seed = secrets.randbelow(SEEDS) if seed is None else seed
    print(f"freedom: seed {seed}", flush=True)
    for words, nodes, count, slow in (
        ("2 to 16 healthy devices", FEW, few, False),
        ("2 to 16 devices, some slow", FEW, few, True),
        ("32 to 1,024 healthy devices", MANY, many, False),
    ):
        if not count:
            continue
        rng = random.Random(f"{seed} {words}")
        jobs = [judged(rng, drawn(rng, nodes, slow=slow), restrictions) for _ in range(count)]
        name = f"{count} drawn jobs of real models, {words}, seed {seed}"
        worst = max(each.worst for each in jobs)
        yield row(
            f"{name}: free plan over the best of {restrictions} restricted ones, worst",
            worst,
            "",
            goal="<= 1",
            met=worst <= 1 + 1e-9,
        )
        ratios = [ratio for each in jobs for ratio in each.ratios]
        slower = sum(ratio > 1 + 1e-9 for ratio in ratios)
        yield row(
            f"{name}: slower than a restricted one, of {len(ratios)}",
            slower,
            "plans",
            goal="<= 0",
            met=not slower,
        )
        searched = [each.searched for each in jobs]
        yield row(f"{name}: processor, median", statistics.median(searched), "s")
        yield row(f"{name}: processor, largest", max(searched), "s")


def real_rows(
    names: tuple[str, ...] = tuple(REAL),
    devices: tuple[int, ...] = (8, 64, 256, 1024),
    slow_names: tuple[str, ...] = SLOW_MODELS,
) -> Iterator[Row]:
    """A free search (micro-batches, ZeRO, recomputation, TP and pipelines) of each real model, 80 GB devices in
    nodes of eight; a batch of two samples to a device on few, of one on many. On 64 some of them with two slow
    devices, too."""
    clusters = [(f"{count:,} devices", count, names, {}) for count in devices]
    if 64 in devices:
        clusters.append(("64 devices, two slow", 64, slow_names, SLOW))
    for where, count, models, rates in clusters:
        slowest, worst = "", 0.0
        for name in models:
            nodes = (8,) * (count // 8)
            problem = job(name, nodes, batch=max(128, count), micro_batches=(1, 2, 4), rates=rates)
            seconds, searched = _planned(problem)
            yield row(f"{name} on {where}, free search: processor", searched, "s")
            yield row(f"{name} on {where}: step", seconds, "s", kind="simulated")
            if searched > worst:
                slowest, worst = name, searched
        words = f"real models on {where}, free search: processor, largest"
        limit = None if rates else GOALS.get(count)
        if limit is None:
            yield row(f"{words} ({slowest})", worst, "s")
        else:
            yield row(f"{words} ({slowest})", worst, "s", goal=f"<= {limit:g}", met=worst <= limit)
