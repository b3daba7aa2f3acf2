"""Layouts and the communication between them: exact on random pairs, seconds at 1,024 devices, lines of code.

make bench NAME=layouts                           # the random pairs take most of it
make bench NAME=layouts ARGS='--only large lines'  # parts; the results keep the others as they are
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

from _frame import PLANNER, PRODUCT, TRAINING, Part, run
from _lanes_parity import lane_rows
from _launches import deadlock_rows, strict_rows
from _lines import line_rows
from _order import order_rows
from _planned import SPEC, grid
from _results import Row, row
from _sequence_side import sequence_rows
from _step_before import ALONE, CUT, step_rows
from _two_level import two_level_rows
from _two_level_links import two_level_link_rows
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.layout.channels import channels
from elasticd_planner.layout.gradient_reduction import buffers_away, gradients_away, reductions, values_back
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search import planner
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.plan import Plan, StatePolicy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner import played_steps

#: The last commit before there was `resolve`.
BEFORE = "0725ea1"
#: Files that changed since for other reasons: what names the device of a worker has one place.
OTHERS = (
    "elasticd/cli/run.py",
    "elasticd/runtime/accelerator.py",
    "elasticd/system/torch_build.py",
    "elasticd/testing/cluster.py",
)
#: Random pairs of layouts, in so many parts.
PAIRS, PARTS_OF_PAIRS = 100_000, 100
SEED = 20
#: The rank whose resolutions are timed, and the most seconds that they may take.
RANK, MOST_SECONDS = "n3/5", 2.0
STATE = StatePolicy(zero=1, replicas=2)


def pair_rows(parts: int = PARTS_OF_PAIRS) -> Iterator[Row]:
    """Uneven, partial, replicated, on other devices; of up to three dimensions and twelve devices."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = pool.map(tried, range(parts), chunksize=1)
    pairs = parts * PAIRS // PARTS_OF_PAIRS
    for what, count in zip(("values", "gradients"), map(sum, zip(*found, strict=True)), strict=True):
        title = f"random pairs of layouts whose {what} are exact"
        yield row(title, count, "", goal=f"{pairs:,}", met=count == pairs)


def tried(part: int) -> tuple[int, int]:
    """How many pairs of one part are exact, of values and of gradients."""
    values = gradients = 0
    for number in range(PAIRS // PARTS_OF_PAIRS):
        seed = SEED * 10**9 + part * (PAIRS // PARTS_OF_PAIRS) + number
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


def large_rows(times: int = 5) -> Iterator[Row]:
    """70B on 1,024 devices: all that a rank derives from a plan, and the planner's own plan with it."""
    yield _timed("plan, layouts and all resolutions of a rank", lambda: resolved(planned()), times)
    for name, plan in (
        ("16 pipelines of 8 stages, TP 8", grid(1, 16, 8)),
        ("128 replicas of TP 8", grid(1, 128, 8)),
        ("32 pipelines of 8 stages, TP 4", grid(1, 32, 4, skip=8)),
    ):
        yield _timed(f"{name}: layouts and all resolutions of a rank", partial(resolved, plan), times)


def planned() -> Plan:
    """What the planner finds for 128 nodes of eight devices, ten of them stragglers, with the degrees given. (A
    search of all degrees has rows of its own in planner.py.)"""
    nodes = tuple(
        Node(name=f"n{n}", devices=tuple(Device(name=f"n{n}/{i}", memory=80_000_000_000) for i in range(8)))
        for n in range(128)
    )
    links = {"inside": Link(bandwidth=300e9, latency=1e-5), "between": Link(bandwidth=50e9, latency=2e-5)}
    slow = {f"n{11 * number}/{number % 8}": 1.5 + number / 4 for number in range(10)}
    problem = Problem(
        cluster=Cluster(nodes=nodes, **links),
        profile=derive(SPEC, 4096, 1),
        global_batch=1024,
        micro_batch=1,
        rates=slow,
        search_space=SearchSpace(states=(STATE,), fixed_tp=8, fixed_dp=32),
    )
    plan = planner.plan(problem, 1).plan
    assert plan is not None
    return plan


def resolved(plan: Plan) -> None:
    """A rank's communicators and its share of every reduction and delivery, under ZeRO with two replicas."""
    layouts = Layouts(SPEC, plan.replace(state=STATE))
    channels(layouts, RANK)
    reductions(layouts, RANK)
    for derived in (gradients_away, values_back, buffers_away):
        derived(layouts, RANK)


def _timed(name: str, work: Callable[[], None], times: int) -> Row:
    """Seconds of the processor, which are the clock's where the machine has nothing else to do."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    middle = statistics.median(spent)
    return row(
        f"1,024 devices, {name}",
        middle,
        "s",
        goal=f"<= {MOST_SECONDS:g}",
        met=middle <= MOST_SECONDS,
        noise=(max(spent) - min(spent)) / middle,
    )


PARTS = {
    "deadlocks": Part(deadlock_rows, PLANNER, {"plans": 100}),
    "lanes": Part(lane_rows, TRAINING, {"most": 1}),
    "large": Part(large_rows, PLANNER, {"times": 1}),
    "lines": Part(partial(line_rows, BEFORE, OTHERS), PRODUCT),
    "order": Part(order_rows, PLANNER, {"blocks": 1, "times": 1}),
    "pairs": Part(pair_rows, PLANNER, {"parts": 1}),
    "sequence": Part(sequence_rows, TRAINING),
    "step": Part(partial(step_rows, BEFORE, ALONE, CUT), TRAINING, {"pairs": 6}),
    "strict": Part(strict_rows, TRAINING, {"plans": 1}),
    "two-level": Part(two_level_rows, PLANNER),
    "two-level-links": Part(two_level_link_rows, ("elasticd/runtime/comm",), {"pairs": 6}),
}

if __name__ == "__main__":
    sys.exit(run("layouts", __doc__, PARTS))
