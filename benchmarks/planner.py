"""The planner's figures: golden rows, optimality on small problems, stragglers, proved gaps, time at scale,
clusters as they are (`drawn`, by _drawn.py), real models (`freedom` and `real`, by _freedom.py), packed jobs
(`packed`, by _packed_plans.py), and memory (`memory`, by _memory.py).

make bench NAME=planner                       # all parts
make bench NAME=planner ARGS="--only time straggler"  # some; the results keep the others as they are

Random problems come from fixed seeds, those of `drawn` from a fresh one. Times are medians in this process,
without the interpreter's start. The oracles (tests/planner/table_brute.py and table_exact.py, and the
enumerations here) share nothing with the search but the formulas.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from _drawn import drawn_rows  # noqa: E402
from _engines import engine_rows  # noqa: E402
from _exactness import exactness_rows  # noqa: E402
from _frame import PLANNER, TRAINING, Part, run  # noqa: E402
from _freedom import freedom_rows, real_rows  # noqa: E402
from _memory import memory_rows  # noqa: E402
from _packed_plans import packed_rows  # noqa: E402
from _results import Row, row  # noqa: E402
from elasticd_planner.problem import Objective  # noqa: E402
from elasticd_planner.problem_files.convert import task_of  # noqa: E402
from elasticd_planner.problem_files.file_format import Planned, TableProblem  # noqa: E402
from elasticd_planner.problem_files.solve import solve  # noqa: E402
from elasticd_planner.search.balance.layer_split import Terms, curve  # noqa: E402
from elasticd_planner.search.balance.micro_batch_split import Line, split_by_lines  # noqa: E402
from elasticd_planner.search.large import LargeSearch  # noqa: E402

from tests.planner import table_brute  # noqa: E402
from tests.planner.brute import compositions  # noqa: E402
from tests.planner.table_exact import can_be_below  # noqa: E402
from tests.planner.tables import REFERENCE, golden, large, small  # noqa: E402

#: Proved gap of plans for 64 devices.
MOST_GAP = 0.025
STRAGGLERS = {"n0/0": 2.57, "n1/0": 5.42, "n2/0": 12.53}
COUNTS = ("one", "two", "three")
FEW = ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (4, 1), (5,), (2, 3))
EIGHT = ((6,), (7,), (8,), (4, 4), (3, 3), (4, 2))
BEYOND = ((9,), (5, 4), (3, 3, 3), (8, 1), (6, 4), (4, 4, 2), (8, 4), (4, 4, 4), (8, 8))

OBJECTIVES: tuple[Objective, ...] = ("step", "steady")

#: Plans that are searched end at this relative distance (pooled.CLOSE), which comparisons must allow.
CLOSE = 2.5e-4


def value(planned: Planned) -> float:
    """The seconds that the plan was chosen for: of a steady step, or of a whole one."""
    assert planned.figures is not None, planned.refusal
    return planned.figures.steady if planned.objective == "steady" else planned.figures.step


def timed(work: Callable[[], Planned], times: int = 5) -> tuple[Planned, float, float]:
    """The answer, the median of the seconds, and their spread over it."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        planned = work()
        spent.append(time.perf_counter() - start)
    middle = statistics.median(spent)
    return planned, middle, (max(spent) - min(spent)) / middle


def at_most(name: str, found: float, limit: float, unit: str, noise: float | None = None) -> Row:
    """A row with the most that its value may be."""
    return row(name, found, unit, goal=f"<= {limit:g}", met=found <= limit * (1 + 1e-9), noise=noise)


def reference_rows(most: int | None = None) -> Iterator[Row]:
    """Golden rows, steady: the planner over the reference; time; rows that are strictly better."""
    better, could, slowest = 0, 0, 0.0
    for entry in REFERENCE["rows"][:most]:
        problem = golden(entry["problem"], entry["rates"])
        planned, seconds, _ = timed(lambda p=problem: solve(p, "steady", ideal=False), 3)  # type: ignore[misc]
        ratio = value(planned) / entry["reference_objective"]
        # The reference prints two decimals.
        better += ratio < 1 - 1e-5
        slowest = max(slowest, seconds)
        slow = " ".join(f"{rate:g}" for rate in entry["rates"].values()) or "healthy"
        words = f"golden {entry['problem']} {slow}"
        yield at_most(f"{words}: steady over reference", ratio, 1 + 1e-5, "")
        yield proved(words, problem, planned)
        could += can_be_below(problem, entry["reference_objective"] * (1 - 1e-5), "steady")
        if "reference_step" in entry:
            stepped = value(solve(problem, "step", ideal=False))
            name = f"{words}: step over the reference's plan"
            yield at_most(name, stepped / entry["reference_step"], 1.0, "")
    # The goal was set before it was proved that most of the references are the best that there is.
    half = (len(REFERENCE["rows"]) + 1) // 2
    words = f"golden rows strictly better, of {len(REFERENCE['rows'])}"
    yield row(words, better, "rows", goal=f">= {half}", met=better >= half)
    yield row(f"golden rows strictly better, of the {could} where a better plan exists", better, "rows")
    yield at_most("golden rows: slowest", slowest, 0.5, "s")


def proved(words: str, problem: TableProblem, planned: Planned) -> Row:
    """Whether all plans were excluded that would be better (tests/planner/table_exact.py)."""
    better = can_be_below(problem, value(planned), planned.objective)
    name = f"{words}: {planned.objective}, proved that no plan is better"
    return row(name, "no" if better else "yes", "", goal="yes", met=not better)


def beyond_rows(count: int = 60) -> list[Row]:
    """Problems of 9 to 16 devices, few layers, often tight memory: plans, refusals and bounds by the oracle."""
    rng = random.Random(6)
    better = wrong = broken = 0
    spent, gaps = [], []
    for _ in range(count):
        problem = small(rng, BEYOND, slow=0.12)
        for objective in OBJECTIVES:
            start = time.perf_counter()
            planned = solve(problem, objective, ideal=False)
            spent.append(time.perf_counter() - start)
            if planned.figures is None:
                wrong += can_be_below(problem, 1e9, objective)
                continue
            better += can_be_below(problem, value(planned) * (1 - CLOSE), objective)
            broken += can_be_below(problem, planned.figures.bound, objective)
            gaps.append(planned.figures.gap)
    words = f"{2 * count} problems of 9 to 16 devices"
    return [
        at_most(f"{words}: plans that could be better", better, 0, "problems"),
        at_most(f"{words}: refused though a plan exists", wrong, 0, "problems"),
        at_most(f"{words}: bound above the least", broken, 0, "problems"),
        row(f"{words}: mean proved gap", statistics.fmean(gaps), ""),
        row(f"{words}: slowest", max(spent), "s"),
    ]


def uneven_rows(count: int = 100) -> list[Row]:
    """Uneven shares in 64ths on up to five devices: plans and the large search's bound against brute force."""
    rng = random.Random(7)
    gaps, broken, wrong = [0.0], 0, 0
    for _ in range(count):
        problem = small(rng, FEW, uneven=True)
        for objective in OBJECTIVES:
            gap, held = compared(problem, objective)
            broken += not held
            wrong += gap is None
            gaps.append(gap if gap is not None and math.isfinite(gap) else 0.0)
    words = f"{2 * count} small problems with uneven shares"
    return [
        at_most(f"{words}: worst gap to brute force", max(gaps), 5e-3, ""),
        at_most(f"{words}: wrongly refused or wrongly accepted", wrong, 0, "problems"),
        at_most(f"{words}: bound above brute force", broken, 0, "problems"),
    ]


def small_rows(few: int = 400, eight: int = 100, bounded: int = 1500) -> list[Row]:
    """Optimality against brute force, and the bound of every small problem."""
    rows = []
    gaps: list[float] = []
    words = f"{few + eight} small problems"
    wrong = broken = bounds = 0
    for seed, count, nodes in ((1, few, FEW), (2, eight, EIGHT)):
        rng = random.Random(seed)
        for _ in range(count):
            problem = small(rng, nodes)
            while nodes is EIGHT and (problem.model.layers > 6 or len(problem.rates) > 4):
                problem = small(rng, nodes)  # what brute force can do in seconds
            for objective in OBJECTIVES:
                gap, held = compared(problem, objective)
                bounds += 1
                broken += not held
                if gap is None:
                    wrong += 1
                elif math.isfinite(gap):
                    gaps.append(gap)
    rng = random.Random(3)
    for _ in range(bounded):
        problem = small(rng, FEW)
        least = table_brute.best(problem, "step")
        bounds += 1
        broken += LargeSearch(task_of(problem, "step")).lower() > least * (1 + 1e-9)
    rows.append(at_most(f"{words}, both objectives: mean gap to brute force", statistics.fmean(gaps), 5e-4, ""))
    rows.append(at_most(f"{words}, both objectives: worst gap", max(gaps), 5e-3, ""))
    rows.append(at_most(f"{words}: wrongly refused or wrongly accepted", wrong, 0, "problems"))
    rows.append(at_most(f"bound above brute force, of {bounds} problems", broken, 0, "problems"))
    return rows


def compared(problem: TableProblem, objective: Objective) -> tuple[float | None, bool]:
    """Gap to brute force (None: one of the two finds no plan; inf: neither does), and whether the bound of
    the large search holds."""
    least = table_brute.best(problem, objective)
    planned = solve(problem, objective, ideal=False)
    held = LargeSearch(task_of(problem, objective)).lower() <= least * (1 + 1e-9)
    if planned.plan is None or math.isinf(least):
        return (math.inf if planned.plan is None and math.isinf(least) else None), held
    return max(0.0, value(planned) / least - 1), held


def subproblem_rows(count: int = 2000) -> list[Row]:
    """Layers and micro-batches against enumeration."""
    rng = random.Random(4)
    layers_wrong = dealt_wrong = 0
    for _ in range(count):
        depth, layers, most = rng.randint(1, 4), rng.randint(1, 8), rng.randint(1, 8)
        terms = []
        for _ in range(depth):
            room = tuple(sorted((rng.randint(0, 8) for _ in range(depth)), reverse=True))
            terms.append(Terms(block=rng.uniform(0.3, 3), fixed=rng.choice([0.0, rng.random()]), most=room))
        found = curve(terms, layers, most)
        for m in range(1, most + 1):
            least = min((pipeline_time(terms, n, m) for n in compositions(layers, depth)), default=math.inf)
            least = least if depth <= layers else math.inf
            layers_wrong += not (found[m - 1] == least or abs(found[m - 1] - least) < 1e-9)
        dealt_wrong += not deals_as_enumerated(rng)
    return [
        at_most(f"layers: wrong of {count} random cases", layers_wrong, 0, "cases"),
        at_most(f"micro-batches: wrong of {count} random cases", dealt_wrong, 0, "cases"),
    ]


def pipeline_time(terms: Sequence[Terms], layers: Sequence[int], m: int) -> float:
    """Seconds of a pipeline by the formula; infinite where memory does not hold the layers."""
    if any(n > t.most[min(m, len(terms)) - 1] for n, t in zip(layers, terms, strict=True)):
        return math.inf
    stages = [t.block * n + t.fixed for n, t in zip(layers, terms, strict=True)]
    return (m - 1) * max(stages) + sum(stages)


def deals_as_enumerated(rng: random.Random) -> bool:
    """Whether a drawn split of micro-batches takes no longer than the best of all splits."""
    lines = []
    for _ in range(rng.randint(1, 4)):
        many = rng.randint(1, 3)
        lines.append(
            Line(
                caps=np.array([rng.uniform(0.5, 3) for _ in range(many)]),
                sums=np.array([rng.uniform(3, 9) for _ in range(many)]),
                least=rng.randint(1, 2),
            )
        )
    total = rng.randint(1, 10)
    given = split_by_lines(lines, total)
    options = [
        split
        for split in itertools.product(range(1, total + 1), repeat=len(lines))
        if sum(split) == total and all(m >= line.least for m, line in zip(split, lines, strict=True))
    ]
    if not options or given is None:
        return (given is None) == (not options)

    def slowest(split: Sequence[int]) -> float:
        return max(line.seconds(m) for m, line in zip(split, lines, strict=True))

    return sum(given) == total and slowest(given) <= min(map(slowest, options)) * (1 + 1e-9)


def straggler_rows(names: Sequence[str] = ("70b", "110b", "32b")) -> Iterator[Row]:
    """Step time above N / sum(1 / x) relative to the healthy plan; gaps; free against pinned."""
    equal = {1: 0.045, 2: 0.065, 3: 0.105}
    for name in names:
        healthy = value(solve(golden(name), ideal=False))
        for count in (1, 2, 3):
            rates = dict(list(STRAGGLERS.items())[:count])
            devices = sum(node.devices for node in golden(name).cluster.nodes)
            yardstick = devices / (devices - count + sum(1 / rate for rate in rates.values()))
            for uneven in (True, False):
                planned = solve(golden(name, rates, uneven=uneven), ideal=False)
                above = value(planned) / healthy / yardstick - 1
                words = f"{name}, {COUNTS[count - 1]}, {'uneven' if uneven else 'equal'} shares"
                if uneven:
                    yield at_most(f"{words}: above N/sum(1/x)", above, 0.035 if name == "32b" else 0.03, "")
                elif name != "32b":
                    yield at_most(f"{words}: above N/sum(1/x)", above, equal[count], "")
                if above > 0.03 and uneven and name != "32b":
                    yield proved(words, golden(name, rates, uneven=True), planned)
                if name != "32b":
                    assert planned.figures is not None
                    yield at_most(f"{words}: proved gap", planned.figures.gap, MOST_GAP, "")
                free = value(solve(golden(name, rates, uneven=uneven, pins=None), ideal=False))
                ratio = free / value(planned)
                yield at_most(f"{words}: everything free over pinned", ratio, 1.0, "")


def time_rows(most: int | None = None) -> Iterator[Row]:
    """Seconds by number of devices, pinned and free, and of a warm replan; memory; determinism."""
    limits = {(64, 3): (0.2, 1.0), (256, 10): (0.5, 2.0), (1024, 10): (1.0, 3.0), (16384, 100): (8.0, 15.0)}
    for (devices, slow), (pinned_limit, free_limit) in itertools.islice(limits.items(), most):
        for pinned, limit in ((True, pinned_limit), (False, free_limit)):
            problem = large(devices, slow, pinned=pinned)
            planned, seconds, noise = timed(
                lambda p=problem: solve(p, ideal=False),  # type: ignore[misc]
                5 if devices < 10000 else 3,
            )
            words = f"{devices:,} devices, {slow} stragglers, {'pinned' if pinned else 'everything searched'}"
            yield at_most(words, seconds, limit, "s", noise)
            assert planned.figures is not None
            if devices == 64:
                yield at_most(f"{words}: proved gap", planned.figures.gap, MOST_GAP, "")
            else:
                yield row(f"{words}: proved gap", planned.figures.gap, "")
    for pinned in (True, False):
        problem = golden("70b", STRAGGLERS, **({} if pinned else {"pins": None}))
        before = solve(problem, ideal=False).plan
        moved = golden("70b", {**STRAGGLERS, "n1/0": 4.1}, **({} if pinned else {"pins": None}))
        warm, seconds, noise = timed(lambda p=moved, b=before: solve(p, ideal=False, like=b))  # type: ignore[misc]
        words = f"64 devices, warm, one rate changed, {'pinned' if pinned else 'everything searched'}"
        if pinned:
            yield at_most(words, seconds, 0.05, "s", noise)
        else:
            yield row(words, seconds, "s", noise=noise)
        cold = value(solve(moved, ideal=False))
        yield row(f"{words}: objective over a cold plan's", value(warm) / cold, "")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield at_most("memory of this process at its peak", peak, 256, "MiB")
    yield row(
        "digests of one problem in two processes",
        same_digest(),
        "",
        goal="equal",
        met=same_digest() == "equal",
    )


def same_digest() -> str:
    """ "equal" or "different": the digests of one plan that processes with other hash seeds made."""
    code = "import sys, elasticd_planner; print(elasticd_planner.plan(sys.stdin.read()).digest)"
    text = json.dumps({**REFERENCE["problems"]["110b"], "rates": STRAGGLERS})
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    return "equal" if len(found) == 1 else "different"


#: Time and memory first: what brute force leaves behind is not the planner's.
PARTS = {
    "time": Part(time_rows, PLANNER, {"most": 1}),
    "reference": Part(reference_rows, PLANNER, {"most": 1}),
    "straggler": Part(straggler_rows, PLANNER, {"names": ("32b",)}),
    "drawn": Part(drawn_rows, PLANNER, {"count": 8, "large_count": 2}),
    "freedom": Part(freedom_rows, PLANNER, {"few": 2, "many": 0, "restrictions": 3, "seed": 7}),
    "real": Part(real_rows, PLANNER, {"names": ("SmolLM2-135M",), "devices": (64,), "slow_names": ()}),
    "packed": Part(packed_rows, PLANNER, {"count": 2, "seed": 3}),
    "subproblem": Part(subproblem_rows, PLANNER, {"count": 20}),
    "small": Part(small_rows, PLANNER, {"few": 10, "eight": 1, "bounded": 10}),
    "beyond": Part(beyond_rows, PLANNER, {"count": 1}),
    "uneven": Part(uneven_rows, PLANNER, {"count": 2}),
    "exactness": Part(exactness_rows, PLANNER, {"plans": 10, "problems": 3}),
    "memory": Part(memory_rows, TRAINING, {"names": ("Qwen3",), "zeros": (2,)}),
    "engines": Part(engine_rows, PLANNER, {"count": 3}),
}

if __name__ == "__main__":
    sys.exit(run("planner", __doc__, PARTS))
