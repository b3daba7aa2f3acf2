"""The bound of whole pipelines: its chains against enumeration, its bounds against every plan, known cases."""

import math
import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from elasticd_planner.problem import Objective
from elasticd_planner.problem_files.convert import task_of
from elasticd_planner.problem_files.file_format import TableProblem
from elasticd_planner.search.bounds.analytic_centre import centre
from elasticd_planner.search.bounds.chain_bound import Budget
from elasticd_planner.search.bounds.cheapest_chain import LAST, Cases, Cheapest, Limits, Pieces
from elasticd_planner.search.large import LargeSearch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sizes
from tests.planner import table_brute
from tests.planner.brute import compositions
from tests.planner.tables import golden, small

TINY = ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (5,), (2, 3))
OBJECTIVES: tuple[Objective, ...] = ("step", "steady")

LAYERS, GROUPS, MOST = 6, 4, 20


@st.composite
def pieces(draw: st.DrawFn) -> Pieces:
    """A few pieces of which memory holds less in stages further to the front, and in first ones."""
    count = draw(st.integers(1, 3))
    blocks = [draw(st.sampled_from([1.0, 1.0, 1.37, 2.5, 6.0, 12.5])) for _ in range(count)]
    rooms = []
    for _ in range(count):
        room = [draw(st.integers(1, LAYERS))]
        for _ in range(2):
            room.append(max(0, room[-1] - draw(st.integers(0, 2))))
        rooms.append(room)
    first = [[max(0, n - draw(st.integers(0, 1))) for n in room] for room in rooms]
    price = np.arange(count)
    return Pieces(blocks=np.array(blocks), rooms=np.array(rooms), first=np.array(first), price=price)


def cheapest(of: Pieces, prices: list[float], count: int, time: float, *, steady: bool, deep: bool) -> float:
    """The least price of a chain that takes `count` micro-batches within `time`: all are looked at."""
    found = math.inf
    for depth in range(1, min(GROUPS, count if deep else GROUPS) + 1):
        for chain in product(range(len(of.blocks)), repeat=depth):
            price = sum(prices[i] for i in chain)
            if price < found and any(
                ends(of, chain, layers, count, steady=steady) <= time * (1 + 1e-9)
                for layers in fitting(of, chain)
            ):
                found = price
    return found


def fitting(of: Pieces, chain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Layers by stage that memory holds."""
    depth = len(chain)
    rooms = []
    for position, i in enumerate(chain):
        behind = min(depth - 1 - position, of.rooms.shape[1] - 1)
        rooms.append((of.rooms if position else of.first)[i, behind])
    for layers in compositions(LAYERS, depth):
        if all(n <= room for n, room in zip(layers, rooms, strict=True)):
            yield layers


def ends(of: Pieces, chain: tuple[int, ...], layers: tuple[int, ...], count: int, *, steady: bool) -> float:
    times = [n * of.blocks[i] for n, i in zip(layers, chain, strict=True)]
    return float(count * max(times) if steady else (count - 1) * max(times) + sum(times))


@settings(max_examples=sizes.examples(160), deadline=None)
@given(
    pieces(),
    st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
    st.lists(st.sampled_from([0.0, 1e-3, 0.01, 0.05]), min_size=len(LAST), max_size=len(LAST)),
    st.floats(5.0, 150.0),
    st.booleans(),
    st.booleans(),
)
def test_no_chain_within_the_time_is_cheaper(
    of: Pieces, prices: list[float], seconds: list[float], time: float, steady: bool, deep: bool
) -> None:
    limits = Limits(layers=LAYERS, fill=int(not steady), deep=deep, groups=GROUPS, most=MOST)
    counts = [1, 2, 3, 4, 5, 7, 12, 16, 20]
    cases = Cases(of, limits, time, np.array(counts))
    own = np.array(prices[: len(of.blocks)])
    found = Cheapest(cases, own, np.array(seconds), 1e6)
    for count in counts:
        least = cheapest(of, prices, count, time, steady=steady, deep=deep)
        assert found.least(count) <= least * (1 + 1e-9)
        if steady:  # nothing is left out
            assert found.least(count) == pytest.approx(min(least, 1e6))
        for case, stages in found.best(count, 2):
            chain = found.chain(case, stages)
            assert chain.depth == stages == chain.groups.sum()
            price = float(own @ chain.groups)
            price += found.rate[case] * (chain.through + (count - 1) * cases.start[case] - time)
            assert price >= found.least(count) - 1e-9


@pytest.mark.parametrize("seed", sizes.every(range(24), 12))
@pytest.mark.parametrize("uneven", [False, True])
def test_no_plan_is_below_it(seed: int, uneven: bool) -> None:
    """Divisions, shares, pins, memory by position and pipelines as deep as they have micro-batches."""
    rng = random.Random(1000 + seed)
    looked_at = 0
    for _ in range(5):
        problem = small(rng, TINY, uneven=uneven)
        for objective in OBJECTIVES:
            least = table_brute.best(problem, objective)
            if math.isfinite(least):
                bounds = by_number(problem, objective, least)
                assert min(bounds) <= least * (1 + 1e-9)
                looked_at += 1
    assert looked_at > 2


def by_number(problem: TableProblem, objective: Objective, least: float) -> list[float]:
    """The bounds of each number of pipelines, as if a worse plan were known and no other bound."""
    wide = LargeSearch(task_of(problem, objective))
    found = []
    for number in wide._numbers(every=True):
        whole = wide._table.whole(number) if wide._table is not None else None
        low = least * 0.4
        found.append(whole.least(low, least * 1.6, Budget(left=2e7)) if whole is not None else low)
    return found


#: 32B with slow whole nodes: rates by node, objective, units, and the gap that may be left. Of steps the units
#: are the least of all pipelines of groups of two, by enumeration; of the steady figure those of a plan.
SLOW: list[tuple[dict[int, float], Objective, float, float]] = [
    ({0: 2.57, 1: 12.53}, "step", 609.4, 0.12),
    ({0: 5.42, 1: 5.42}, "step", 569.2, 0.12),
    ({0: 12.53, 1: 12.53}, "step", 986.9, 0.17),
    ({0: 1.71, 1: 12.53}, "steady", 454.9, 0.06),
]


@pytest.mark.parametrize(("nodes", "objective", "optimum", "gap"), SLOW)
def test_slow_nodes_that_are_a_part_of_every_pipeline_leave_a_small_gap(
    nodes: dict[int, float], objective: Objective, optimum: float, gap: float
) -> None:
    rates = {f"n{node}/{i}": rate for node, rate in nodes.items() for i in range(8)}
    wide = LargeSearch(task_of(golden("32b", rates), objective))
    assert optimum / (1 + gap) <= wide.lower(optimum) <= optimum


def test_the_centre_keeps_every_cut_and_is_none_where_cuts_contradict() -> None:
    cuts = np.array([[1.0, -1.0, 0.0], [0.0, 1.0, -2.0]])
    found = centre(cuts, np.full(3, 0.5))
    assert found is not None
    assert (cuts @ found > 0).all()
    assert ((found > 0) & (found < 1)).all()
    assert centre(np.array([[1.0, -1.0], [-1.0, 1.0]]), np.full(2, 0.5)) is None
