"""Batches of unequal sequences: planning times, gaps to the bound, and other planners on the same lengths.

make bench NAME=batch                              # some minutes
make bench NAME=batch ARGS='--only planning pool'  # parts; the results keep the others as they are

What is simulated is played by events on lanes of known speed, the exchange of keys counted (the simulator);
what is measured is the processor time of the dealing that a job runs. Lengths are drawn from other seeds than
those on which the dealing was tuned.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean

import numpy as np
from _batch_emulated import emulated_rows
from _batch_pool import pool_rows
from _batch_runtime import exchange_rows, form_rows, heads_rows, parity_rows, uncut_rows
from _frame import PLANNER, TRAINING, Part, run
from _results import Kind, Row, row
from _step_before import ALONE, step_rows
from elasticd_planner.batching.lane_slowdown import SlowdownState, step
from elasticd_planner.batching.row_balance import pipeline_time
from elasticd_planner.spec.plan import Plan

from elasticd.simulator.devices.packed_rows import (
    Gang,
    bound,
    cut_share,
    dealt,
    normal,
    plan_of,
    row_times,
    seconds,
    with_stragglers,
)
from elasticd.simulator.results.packed_baselines import (
    dhp,
    dhp_by_length,
    flexsp,
    static_by_cost,
    static_in_order,
    without_stragglers,
)
from elasticd.simulator.scenarios.corpus import CORPORA, Lengths

SEED = 23_110_000
#: The commit before packed batches: what a step of samples of one length takes now is compared with it.
BASE = "3c1ce840"
LANES, BATCH, BATCHES = 64, 512, 100
LARGE, LARGE_BATCH, LARGE_SLOW, LARGE_BATCHES = 1024, 8192, 20, 8
SLOW = 3
#: Batches of each corpus that the other planners have.
COMPARED = 20


def drawn(corpus: str, part: int, count: int) -> Lengths:
    """The lengths of one batch."""
    return CORPORA[corpus](np.random.default_rng((SEED, [*CORPORA].index(corpus), part)), count)


def gang(part: int, lanes: int = LANES, slow: int = 0) -> Gang:
    """Lanes of which others are slow in each part."""
    return with_stragglers(np.random.default_rng((SEED + 1, part)), lanes, slow)


def planning_rows(batches: int = BATCHES, large_batches: int = LARGE_BATCHES) -> Iterator[Row]:
    """Processor time of one step's dealing, its pieces made, in a process that collects garbage as ever."""
    plan = plan_of(normal(LANES))
    first = _spent(drawn("files", BATCHES, BATCH), gang(0), plan)
    yield row(f"planning {LANES} lanes x {BATCH} sequences, the first step of a plan", first, "ms")
    for corpus in CORPORA:
        spent = [_spent(drawn(corpus, part, BATCH), gang(0), plan) for part in range(batches)]
        middle, high = statistics.median(spent), sorted(spent)[math.ceil(0.99 * len(spent)) - 1]
        title = f"planning {LANES} lanes x {BATCH} sequences of {corpus}"
        yield _at_most(f"{title}, median", middle, 5, "ms", noise=(high - min(spent)) / middle)
        yield _at_most(f"{title}, 99 % of {batches} steps", high, 10, "ms")
    staged = normal(16, stages=4)
    plan = plan_of(staged)
    spent = [_spent(drawn("files", part, BATCH), staged, plan) for part in range(8)]
    title = f"planning 16 lanes x 4 stages x {BATCH} sequences of files in even rows, median"
    yield row(title, statistics.median(spent), "ms")
    plan, lanes = plan_of(normal(LARGE)), gang(0, LARGE, LARGE_SLOW)
    first = _spent(drawn("files", BATCHES, LARGE_BATCH), lanes, plan)
    yield row(f"planning {LARGE:,} lanes x {LARGE_BATCH:,} sequences, the first step of a plan", first, "ms")
    for corpus in CORPORA:
        spent = [_spent(drawn(corpus, part, LARGE_BATCH), lanes, plan) for part in range(large_batches)]
        middle = statistics.median(spent)
        title = f"planning {LARGE:,} lanes x {LARGE_BATCH:,} sequences of {corpus}, {LARGE_SLOW} slow, median"
        yield _at_most(title, middle, 50, "ms", noise=(max(spent) - min(spent)) / middle)


def _spent(lengths: Lengths, lanes: Gang, plan: Plan) -> float:
    start = time.process_time()
    dealt(lengths, lanes, plan)
    return 1e3 * (time.process_time() - start)


def gap_rows(batches: int = BATCHES, large_batches: int = 3) -> Iterator[Row]:
    """A step over its bound: all work over all speed, and the fewest rows that memory allows."""
    for slow, most in ((0, 1.06), (SLOW, 1.08)):
        means = []
        for corpus in CORPORA:
            gaps, cuts = _gaps(corpus, LANES, BATCH, slow, batches)
            means.append(fmean(gaps))
            title = f"step over its bound, {LANES} lanes, {slow} slow, {corpus} ({fmean(cuts):.0%} cut)"
            yield _at_most(f"{title}: mean of {batches}", means[-1], most, "x", kind="simulated")
            if slow:
                yield row(f"{title}: worst of {batches}", max(gaps), "x", kind="simulated")
            else:
                yield _at_most(f"{title}: worst of {batches}", max(gaps), 1.12, "x", kind="simulated")
    for corpus in CORPORA:
        gaps, cuts = _gaps(corpus, LARGE, LARGE_BATCH, LARGE_SLOW, large_batches)
        title = f"step over its bound, {LARGE:,} lanes, {LARGE_SLOW} slow, {corpus} ({fmean(cuts):.0%} cut)"
        yield _at_most(f"{title}: mean of {large_batches}", fmean(gaps), 1.08, "x", kind="simulated")


def _gaps(corpus: str, lanes: int, count: int, slow: int, batches: int) -> tuple[list[float], list[float]]:
    plan, gaps, cuts = plan_of(normal(lanes)), [], []
    for part in range(batches):
        lengths, here = drawn(corpus, part, count), gang(part, lanes, slow)
        rows = dealt(lengths, here, plan)
        gaps.append(seconds(rows, here) / bound(lengths, here))
        cuts.append(cut_share(rows, count))
    return gaps, cuts


def stage_rows(batches: int = 10) -> Iterator[Row]:
    """Pipelines of several stages: over rows of equal cost, as many, and their fill."""
    lanes, stages = 16, 4
    plan, found = plan_of(normal(lanes, stages=stages)), []
    for corpus in CORPORA:
        over = []
        for part in range(batches):
            here = normal(lanes, stages=stages)
            lengths = drawn(corpus, part, BATCH)
            times = [row_times(each, here)[0].max() for each in dealt(lengths, here, plan)]
            even = here.cost(lengths, lengths).sum() / lanes / len(times) + here.fixed
            played = pipeline_time([round(float(each)) for each in times], stages)
            over.append(played / (even * (len(times) + stages - 1) / stages))
        found.append(fmean(over))
        title = f"{lanes} lanes x {stages} stages over rows of equal cost and their fill, {corpus}"
        yield row(f"{title}: mean of {batches}", found[-1], "x", kind="simulated")
    title = f"{lanes} lanes x {stages} stages over rows of equal cost and their fill: mean of four corpora"
    yield _at_most(title, fmean(found), 1.06, "x", kind="simulated")


Planner = Callable[[Lengths, Gang], float]


def compared_rows(batches: int = COMPARED) -> Iterator[Row]:
    """A step over those of other planners, on the same lengths and lanes."""
    yield from _compared(
        0,
        batches,
        (
            ("DHP", dhp, 0.90, True),
            ("DHP by length", dhp_by_length, 0.88, True),
            ("FlexSP", flexsp, 0.82, True),
            ("static degrees in order", static_in_order, 0.72, True),
            ("static degrees by cost", static_by_cost, 0.85, True),
        ),
    )
    yield from _compared(
        SLOW,
        batches,
        (
            ("DHP", dhp, 0.50, False),
            ("DHP without the slow lanes", without_stragglers(dhp), 0.92, False),
        ),
    )


def _compared(slow: int, batches: int, planners: Sequence[tuple[str, Planner, float, bool]]) -> Iterator[Row]:
    plan = plan_of(normal(LANES))
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name, *_ in planners}
    for corpus in CORPORA:
        for part in range(batches):
            lengths, lanes = drawn(corpus, part, BATCH), gang(part, slow=slow)
            ours = seconds(dealt(lengths, lanes, plan), lanes)
            for name, planner, *_ in planners:
                ratios[name].setdefault(corpus, []).append(ours / planner(lengths, lanes))
    for name, _, most, never_above in planners:
        means = {corpus: fmean(found) for corpus, found in ratios[name].items()}
        each = ", ".join(f"{corpus} {mean:.2f}" for corpus, mean in means.items())
        title = f"step over that of {name}, {slow} slow: mean of four corpora ({each})"
        yield _at_most(title, fmean(means.values()), most, "x", kind="simulated")
        if never_above:
            title = f"step over that of {name}, {slow} slow: worst mean of a corpus"
            yield _at_most(title, max(means.values()), 1.00, "x", kind="simulated")


def published_rows(batches: int = COMPARED) -> Iterator[Row]:
    """The other planners on the set-ups of their papers, as far as lengths and links are known. (What is
    published of Hydraulis is in `_batch_pool`.)"""
    drawings = [drawn("video", part, BATCH) for part in range(batches)]
    title = "DHP over the best static degree, 32 groups of two, batch 512, clips of log-normal lengths"
    # Its published degrees sum to 32 on 64 devices, 8 a node. Its clips' lengths are not public.
    lanes = normal(32, node=4)
    found = fmean(static_in_order(each, lanes) / dhp(each, lanes) for each in drawings)
    yield _within(f"{title}, links as in the other rows: published 1.14 to 1.36", found, 1.14, 1.36)
    lanes = normal(32, node=4, far=0.36)
    found = fmean(static_in_order(each, lanes) / dhp(each, lanes) for each in drawings)
    yield row(f"{title}, links of 100 Gb/s between nodes, as it had", found, "x", kind="simulated")
    lanes = normal(64)
    drawings = [drawn("wikipedia", part, BATCH) for part in range(batches)]
    found = fmean(static_in_order(each, lanes) / flexsp(each, lanes) for each in drawings)
    title = (
        "FlexSP over the best static degree, 64 GPUs, batch 512, its Wikipedia lengths: published up to 1.98"
    )
    yield _within(title, found, 1.0, 1.98)


def slowdown_rows(steps: int = 10_000) -> Iterator[Row]:
    """Agreed slowdowns of eight lanes under noise, and of one that becomes slow."""
    draw = random.Random(SEED)

    def gaussian(_now: int, _lane: int) -> float:
        return math.exp(draw.gauss(0, 0.03))

    wandering = [0.0] * 8

    def autoregressive(_now: int, lane: int) -> float:
        wandering[lane] = 0.95 * wandering[lane] + draw.gauss(0, 0.03 * math.sqrt(1 - 0.95**2))
        return math.exp(wandering[lane])

    for name, noise, most in (
        ("Gaussian noise of 3 %", gaussian, 3),
        ("noise AR(1) 0.95 of 3 %", autoregressive, 10),
    ):
        changes = sum(changed for _, changed in _slowdowns(steps, noise))
        yield _at_most(
            f"changes of shares in {steps:,} steps of 8 lanes, {name}",
            changes,
            most,
            "changes",
            kind="simulated",
        )

    def bursts(now: int, lane: int) -> float:
        return (1.2 if lane == 3 and now % 100 >= 95 else 1.0) * math.exp(draw.gauss(0, 0.01))

    late, since = 0, 0
    for now, (slowdown, _) in enumerate(_slowdowns(steps, bursts)):
        since = 0 if now % 100 >= 95 else since + 1
        if abs(slowdown[3] / 64 - 1) > 0.07 and now % 100 < 95:
            late = max(late, since)
    title = f"steps after a burst (5 steps of 20 %, {steps // 100} of them) until shares are back"
    yield _at_most(title, late, 10, "steps", kind="simulated")
    for times in (1.2, 1.5, 2.0, 4.0):
        agreed = [
            each[3] / 64
            for each, _ in _slowdowns(120, lambda now, lane, t=times: t if lane == 3 and now >= 100 else 1.0)
        ]
        until = next(now for now in range(100, 120) if abs(agreed[now] / times - 1) <= 0.1) - 99
        title = f"one lane {times:g} x slower: votes until its agreed slowdown is within 10 %"
        yield _at_most(title, until, 4, "steps", kind="simulated")


def _slowdowns(steps: int, slowness: Callable[[int, int], float]) -> Iterator[tuple[tuple[int, ...], int]]:
    state = SlowdownState.begin((64,) * 8)
    for now in range(steps):
        state, changes = step(state, [slowness(now, lane) for lane in range(8)], [1.0] * 8)
        yield state.slowdown, len(changes)


def _at_most(
    name: str, value: float, most: float, unit: str, *, kind: Kind = "measured", noise: float | None = None
) -> Row:
    return row(name, value, unit, kind=kind, goal=f"<= {most:g}", met=value <= most, noise=noise)


def _within(name: str, value: float, least: float, most: float) -> Row:
    met = least <= value <= most
    return row(name, value, "x", kind="simulated", goal=f"{least:.2f} to {most:.2f}", met=met)


_PLAYED = (*PLANNER, "elasticd/simulator")
PARTS = {
    "planning": Part(planning_rows, PLANNER, {"batches": 2, "large_batches": 1}),
    "gap": Part(gap_rows, _PLAYED, {"batches": 1, "large_batches": 1}),
    "stages": Part(stage_rows, _PLAYED, {"batches": 1}),
    "compared": Part(compared_rows, _PLAYED, {"batches": 1}),
    "published": Part(published_rows, _PLAYED, {"batches": 1}),
    "pool": Part(pool_rows, _PLAYED, {"steps": 1}),
    "slowdown": Part(slowdown_rows, PLANNER, {"steps": 200}),
    "emulated": Part(emulated_rows, TRAINING, {"steps": 3, "slow_steps": 5}),
    "parity": Part(parity_rows, TRAINING, {"most": 1}),
    "heads": Part(heads_rows, TRAINING, {"most": 1}),
    "forms": Part(form_rows, PLANNER),
    "exchange": Part(exchange_rows, TRAINING),
    "uncut": Part(uncut_rows, TRAINING, {"rounds": 40}),
    "step": Part(partial(step_rows, BASE, ALONE), TRAINING, {"pairs": 6}),
}

if __name__ == "__main__":
    sys.exit(run("batch", __doc__, PARTS))
