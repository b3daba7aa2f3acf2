"""The bound's parts against enumeration."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
from elasticd_planner.cost.group_bound import Paces, by_slowest, by_speed, hull, least, lines
from elasticd_planner.cost.pipeline_time import Formula, Schedule, Steady, Times, Timing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.brute import compositions
from tests.sizes import examples

RATES = st.lists(st.sampled_from([1.0, 1.0, 1.3, 2.0, 3.3, 5.0]), min_size=1, max_size=5)
SLOWDOWN = {1: 3.7, 2: 1.9, 3: 1.4, 4: 1.0}


def groupings(devices: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """All sets of disjoint groups, some devices idle."""
    if not devices:
        return [()]
    first, rest = devices[0], devices[1:]
    found = groupings(rest)
    for size in range(min(4, len(devices))):
        for others in combinations(rest, size):
            left = tuple(i for i in rest if i not in others)
            found += [((first, *others), *more) for more in groupings(left)]
    return found


def reached(paces: Paces, count: int) -> list[float]:
    """The most by number of groups."""
    return [max((pace for pace, k, _ in paces if k == of), default=-math.inf) for of in range(count + 1)]


@given(RATES)
def test_groups_of_neighbours_reach_what_any_groups_reach(rates: list[float]) -> None:
    found = by_slowest(rates, (1, 2, 3, 4), lambda width, rate: SLOWDOWN[width] * rate)
    best = [-math.inf] * (len(rates) + 1)
    for groups in groupings(tuple(range(len(rates)))):
        reach = sum(1 / (SLOWDOWN[len(g)] * max(rates[i] for i in g)) for g in groups)
        best[len(groups)] = max(best[len(groups)], reach)
    assert reached(found, len(rates)) == pytest.approx(best)


@given(RATES)
def test_paces_by_speed_reach_what_any_groups_reach_at_most(rates: list[float]) -> None:
    paces = {width: 1 / (slowdown * width) for width, slowdown in SLOWDOWN.items()}
    found = by_speed(rates, paces)
    best = [-math.inf] * (len(rates) + 1)
    for groups in groupings(tuple(range(len(rates)))):
        reach = sum(paces[len(g)] * sum(1 / rates[i] for i in g) for g in groups)
        best[len(groups)] = max(best[len(groups)], reach)
    assert reached(found, len(rates)) == pytest.approx(best)


def test_the_hull_keeps_what_reaches_more() -> None:
    paces = ((0.0, 0, 4), (2.0, 1, 2), (1.5, 1, 3), (1.0, 2, 0), (3.0, 3, 0))
    assert hull(paces, 0.0) == ((0.0, 0, 0), (2.0, 1, 0), (3.0, 3, 0))
    assert hull(paces, 0.3) == ((0.0, 0, 4), (2.0, 1, 2), (1.5, 1, 3), (3.0, 3, 0))


def test_a_node_is_worth_nothing_where_there_is_no_time() -> None:
    node = ((0.0, 0, 2), (2.0, 1, 0))

    def worth(time: float, timing: Timing) -> float:
        return max(time * pace + more for pace, more in lines(node, timing))

    assert worth(0.1, Formula()) == 0
    assert worth(3.0, Formula()) == 5
    assert worth(3.0, Steady()) == 6
    # In the schedule stages hide a quarter of their work: any two groups add as much each, the good one more.
    assert worth(0.1, Schedule(0.25)) == 0.5
    assert worth(3.0, Schedule(0.25)) == 5.25


def test_one_healthy_pipeline_meets_its_bound() -> None:
    """Four stages of 20 layers at cost 1, 32 micro-batches: 31 x 20 + 80."""
    node = ((0.0, 0, 0), (1.0, 1, 0))
    assert least([(node, 4)], 80, 32, 1, Formula()) == pytest.approx(700)
    assert least([(node, 4)], 80, 32, 1, Steady()) == pytest.approx(640)


PACES = st.lists(st.sampled_from([0.4, 1.0, 1.0, 2.5, 8.0, 30.0]), min_size=1, max_size=4)


@settings(max_examples=examples(120))
@given(PACES, st.integers(1, 7), st.integers(1, 14), st.sampled_from([0.25, 1 / 3, 0.5]))
def test_no_pipelines_beat_the_bound_in_the_schedules_time(
    blocks: list[float], layers: int, total: int, forward: float
) -> None:
    """Groups that may be used or not, one or two pipelines in any order, with any layers and micro-batches."""
    curves = {}
    for size in range(1, min(len(blocks), layers) + 1):
        for chain in permutations(range(len(blocks)), size):
            rows = np.array(list(compositions(layers, size)))
            work = rows * np.array([blocks[i] for i in chain])
            times = Times(
                forward=forward * work, backward=(1 - forward) * work, boundary=np.zeros((len(rows), size - 1))
            )
            seconds = Schedule().curve(times, total).min(axis=1)
            used = frozenset(chain)
            curves[used] = np.minimum(curves.get(used, np.inf), seconds)
    best = {1: min(float(curve[-1]) for curve in curves.values()), 2: math.inf}
    for one, two in permutations(curves, 2):
        if not one & two:
            for m in range(1, total):
                best[2] = min(best[2], max(float(curves[one][m - 1]), float(curves[two][total - m - 1])))
    nodes = [(hull(((0.0, 0, 1), (1 / block, 1, 0)), forward), 1) for block in blocks]
    for pipelines, seconds in best.items():
        found = least(nodes, layers, total, pipelines, Schedule(forward))
        assert found <= seconds * (1 + 1e-9)


def test_equal_stages_come_close_to_the_bound_of_the_schedule() -> None:
    """Four stages of 20 layers at cost 1, 32 micro-batches: 35 x 20, of which two thirds of a stage are hidden
    three times at most."""
    node = ((0.0, 0, 1), (1.0, 1, 0))
    assert least([(node, 4)], 80, 32, 1, Schedule(1 / 3)) == pytest.approx((32 + 3 * 2 / 3) * 20)


def test_no_devices_have_no_time() -> None:
    assert math.isinf(least([(((0.0, 0, 0),), 3)], 80, 32, 1, Formula()))
