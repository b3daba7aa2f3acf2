"""Layouts and the communication between them: exactness on random pairs, and seconds at 1,024 devices.

make bench NAME=layouts
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from _planned import SPEC, grid
from _results import Row, finish, row
from elasticd_planner.layout.gradient_reduction import gradients_away, reductions, values_back
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import StatePolicy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner import played_steps

#: Random pairs of layouts, in so many parts.
PAIRS, PARTS = 100_000, 100
SEED = 20


def tried(part: int) -> tuple[int, int]:
    """How many pairs of one part are exact, of values and of gradients."""
    values = gradients = 0
    for number in range(PAIRS // PARTS):
        seed = SEED * 10**9 + part * (PAIRS // PARTS) + number
        draw = random.Random(seed)
        source, target = played_steps.drawn_pair(draw, whole=True)
        values += _holds(partial(played_steps.check_value, source, target, seed))
        add = draw.random() < 0.5
        gradients += _holds(partial(played_steps.check_adjoint, source, target, seed, add=add))
    return values, gradients


def _holds(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError as error:
        print(f"not exact: {error}", file=sys.stderr)
        return False
    return True


def pair_rows() -> Iterator[Row]:
    """Uneven, partial, replicated, on other devices; of up to three dimensions and twelve devices."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = pool.map(tried, range(PARTS), chunksize=1)
    for what, count in zip(("values", "gradients"), map(sum, zip(*found, strict=True)), strict=True):
        title = f"random pairs of layouts whose {what} are exact"
        yield row(title, count, "", goal=f"{PAIRS:,}", met=count == PAIRS)


def large_rows() -> Iterator[Row]:
    """70B on 1,024 devices: all that a rank derives from a plan."""
    for name, arguments in (
        ("16 pipelines of 8 stages, TP 8", {"pipelines": 16, "width": 8}),
        ("128 replicas of TP 8", {"pipelines": 128, "width": 8}),
        ("32 pipelines of 8 stages, TP 4", {"pipelines": 32, "width": 4, "skip": 8}),
    ):
        plan = grid(1, **arguments).replace(state=StatePolicy(zero=1, replicas=2))  # type: ignore[arg-type]
        spent = []
        for _ in range(3):
            start = time.perf_counter()
            layouts = Layouts(SPEC, plan)
            reductions(layouts)
            for derive in (gradients_away, values_back):
                derive(layouts, "n3/5")
            spent.append(time.perf_counter() - start)
        middle = statistics.median(spent)
        yield row(
            f"1,024 devices, {name}: layouts and all resolutions of a rank",
            middle,
            "s",
            goal="<= 2",
            met=middle <= 2,
            noise=(max(spent) - min(spent)) / middle,
        )


def rows() -> Iterator[Row]:
    """All."""
    yield from large_rows()
    yield from pair_rows()


if __name__ == "__main__":
    sys.exit(finish("layouts", list(rows())))
