"""The bound's parts against enumeration."""

import math
from itertools import combinations

import pytest
from elasticd_planner.bound import by_slowest, by_speed, hull, least, worth
from hypothesis import given
from hypothesis import strategies as st

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


@given(RATES)
def test_groups_of_neighbours_reach_what_any_groups_reach(rates: list[float]) -> None:
    found = by_slowest(rates, (1, 2, 3, 4), lambda width, rate: SLOWDOWN[width] * rate)
    best = [-math.inf] * (len(rates) + 1)
    for groups in groupings(tuple(range(len(rates)))):
        reach = sum(1 / (SLOWDOWN[len(g)] * max(rates[i] for i in g)) for g in groups)
        best[len(groups)] = max(best[len(groups)], reach)
    assert found == pytest.approx(best)


@given(RATES)
def test_paces_by_speed_reach_what_any_groups_reach_at_most(rates: list[float]) -> None:
    paces = {width: 1 / (slowdown * width) for width, slowdown in SLOWDOWN.items()}
    found = by_speed(rates, paces)
    best = [-math.inf] * (len(rates) + 1)
    for groups in groupings(tuple(range(len(rates)))):
        reach = sum(paces[len(g)] * sum(1 / rates[i] for i in g) for g in groups)
        best[len(groups)] = max(best[len(groups)], reach)
    assert found == pytest.approx(best)


def test_the_hull_keeps_what_reaches_more() -> None:
    assert hull((0.0, 2.0, 1.0, 3.0, -math.inf)) == ((0.0, 0), (2.0, 1), (3.0, 3))


def test_a_node_is_worth_nothing_where_there_is_no_time() -> None:
    assert worth(((0.0, 0), (2.0, 1)), 0.1, steady=False) == 0
    assert worth(((0.0, 0), (2.0, 1)), 3.0, steady=False) == 5
    assert worth(((0.0, 0), (2.0, 1)), 3.0, steady=True) == 6


def test_one_healthy_pipeline_meets_its_bound() -> None:
    """Four stages of 20 layers at cost 1, 32 micro-batches: 31 x 20 + 80."""
    node = ((0.0, 0), (1.0, 1))
    assert least([(node, 4)], 80, 32, 1, steady=False) == pytest.approx(700)
    assert least([(node, 4)], 80, 32, 1, steady=True) == pytest.approx(640)


def test_no_devices_have_no_time() -> None:
    assert math.isinf(least([(((0.0, 0),), 3)], 80, 32, 1, steady=False))
