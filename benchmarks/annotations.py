"""Annotations: HSPMD's operators and strategies, random pairs, its switch of 32 to 31 GPUs; 3D parallelism.

make bench NAME=annotations                                 # pairs and topology take most of it
make bench NAME=annotations ARGS='--only operators three-d'  # parts; the results keep the others as they are

`tests/planner/hspmd_operators.py` has the cases, `tests/planner/recorded/hspmd_strategies.json` the published
numbers with their sources.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from _annotated_jobs import job_rows
from _frame import PLANNER, PRODUCT, TRAINING, Part, run
from _hspmd_switch import Load, ours, theirs
from _results import Row, row
from _three_d import parity_rows, topology_rows
from elasticd_planner.layout.explain import explain
from elasticd_planner.value import Invalid

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner import hspmd_operators, hspmd_strategies, played_steps
from tests.planner.drawn_annotations import drawn_annotation

#: Random pairs of annotations, in so many parts.
PAIRS, PARTS_OF_PAIRS = 20_000, 100
SEED = 21
SHAPES = ((24,), (16, 17))
DEVICES = tuple(f"n{node}/{index}" for node in range(3) for index in range(4))
#: Bytes a second of a device to its node's others, and to other nodes: NVLink, and one 400 Gb/s port for each.
NVLINK, INFINIBAND = 450e9, 50e9


def operator_rows() -> Iterator[Row]:
    """Figures 7 to 10 of the paper, and what it marks as unsupported or cannot divide."""
    published = hspmd_operators.PUBLISHED
    right = sum(explain(*case.layouts()).operators == case.operators for case in published)
    title = "operators as the HSPMD paper publishes them (figures 7 to 10)"
    yield row(title, right, f"of {len(published)}", goal=f"{len(published)}", met=right == len(published))
    beyond = hspmd_operators.BEYOND
    resolved = 0
    for case in beyond:
        source, target = case.layouts()
        resolved += _holds(partial(played_steps.check_in_two, source, target, SEED))
    title = "cases that HSPMD refuses or cannot divide, resolved and exact"
    yield row(title, resolved, f"of {len(beyond)}", goal=f"{len(beyond)}", met=resolved == len(beyond))


def strategy_rows() -> Iterator[Row]:
    """Theirs, to a plan, back to theirs: every parameter's annotation."""
    same = {True: 0, False: 0}
    total = {True: 0, False: 0}
    for name, pipelines, micro_batches, merged in hspmd_strategies.strategies():
        configs = hspmd_strategies.theirs(pipelines, merged)
        spec = hspmd_strategies.spec(len(pipelines[0]))
        mixed = name.startswith("mixed")
        total[mixed] += 1
        made = hspmd_strategies.plan(spec, configs, micro_batches)
        same[mixed] += hspmd_strategies.back(spec, made, merged) == configs
    for mixed, title in ((False, "published strategies"), (True, "mixed-length strategies")):
        title = f"{title} of HSPMD that come back identical from a plan"
        yield row(
            title, same[mixed], f"of {total[mixed]}", goal=f"{total[mixed]}", met=same[mixed] == total[mixed]
        )


def tried(part: int) -> tuple[int, int]:
    """How many pairs of one part are exact, of values and of gradients."""
    values = gradients = 0
    for number in range(PAIRS // PARTS_OF_PAIRS):
        seed = SEED * 10**9 + part * (PAIRS // PARTS_OF_PAIRS) + number
        draw = random.Random(seed)
        shape = draw.choice(SHAPES)
        source, target = (
            drawn_annotation(draw, shape, devices=DEVICES, terms=draw.random() < chance).layout(shape)
            for chance in (0.7, 0.3)
        )
        values += _holds(partial(played_steps.check_in_two, source, target, seed))
        add = draw.random() < 0.5
        gradients += _holds(partial(played_steps.check_adjoint, source, target, seed, add=add, in_two=True))
    return values, gradients


def pair_rows(parts: int = PARTS_OF_PAIRS) -> Iterator[Row]:
    """Uneven, nested, of terms and copies, in one to three groups of other devices."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = pool.map(tried, range(parts), chunksize=1)
    pairs = parts * PAIRS // PARTS_OF_PAIRS
    for what, count in zip(("values", "gradients"), map(sum, zip(*found, strict=True)), strict=True):
        title = f"random pairs of annotations whose {what} are exact"
        yield row(title, count, "", goal=f"{pairs:,}", met=count == pairs)


#: Other switches between published strategies: names of cases, what they are.
OTHER_SWITCHES = (
    ("case 5", "case 6", "3 pipelines to 2 on 24 H20 and 15 H800"),
    ("case 6", "case 5", "2 pipelines to 3 on 24 H20 and 15 H800"),
    ("case 12", "case 14", "32 to 24 H20"),
)


def switch_rows() -> Iterator[Row]:
    """C1 to C2: one of 32 GPUs is gone, 60 layers. And others, without a goal."""
    mine, least, others = switched("case 12", "case 13")
    title = "HSPMD's switch of 32 to 31 GPUs"
    ratio = mine.moved / least
    yield row(f"{title}: bytes over the least", ratio, "x", kind="simulated", goal="1.00", met=ratio == 1)
    ratio = seconds(mine) / min(map(seconds, others.values()))
    name = f"{title}: busiest link over the best of its three algorithms"
    yield row(name, ratio, "x", kind="simulated", goal="<= 1.00", met=ratio <= 1)
    ratio = mine.node / min(load.node for load in others.values())
    yield row(f"{title}: bytes that leave the busiest node over the best", ratio, "x", kind="simulated")
    volume = others["greedy"].moved / others["first"].moved
    name = f"{title}: volume of its fused algorithm over its unfused one (the paper: the same)"
    yield row(name, volume, "x", kind="simulated", goal="1.00", met=volume == 1)
    for old, new, what in OTHER_SWITCHES:
        mine, least, others = switched(old, new)
        ratio = seconds(mine) / min(map(seconds, others.values()))
        yield row(f"{what}: busiest link over the best of its three", ratio, "x", kind="simulated")


def switched(old: str, new: str) -> tuple[Load, int, Mapping[str, Load]]:
    """elasticd's load of a switch between two published strategies, the least bytes, and HSPMD's loads.
    Devices that only the old one has are gone."""
    given = {name: rest for name, *rest in hspmd_strategies.strategies()}
    plans = []
    for name in (old, new):
        pipelines, micro_batches, merged = given[name]
        spec = hspmd_strategies.spec(len(pipelines[0]))
        plans.append(hspmd_strategies.plan(spec, hspmd_strategies.theirs(pipelines, merged), micro_batches))
    before, after = plans
    gone = sorted({*before.members} - {*after.members})
    mine, least = ours(spec, before, after, gone)
    return mine, least, theirs(spec, before, after, gone)


def seconds(load: Load) -> float:
    """Of the busiest link: what a device sends in its node, or to others."""
    return max(load.nvlink / NVLINK, load.infiniband / INFINIBAND)


def _holds(check: Callable[[], None]) -> bool:
    try:
        check()
    except (AssertionError, Invalid) as error:
        print(f"not exact: {error}", file=sys.stderr)
        return False
    return True


PARTS = {
    "operators": Part(operator_rows, PLANNER),
    "strategies": Part(strategy_rows, (*PLANNER, "elasticd/annotations.py")),
    "switch": Part(switch_rows, PLANNER),
    "pairs": Part(pair_rows, PLANNER, {"parts": 1}),
    "jobs": Part(job_rows, PRODUCT, {"only_given": True}),
    "three-d": Part(parity_rows, TRAINING, {"most": 1}),
    "topology": Part(topology_rows, PLANNER, {"clusters": 8}),
}

if __name__ == "__main__":
    sys.exit(run("annotations", __doc__, PARTS))
