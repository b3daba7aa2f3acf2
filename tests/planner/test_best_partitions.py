"""The divisions that lead and what they reach, against enumeration."""

import math
from collections import Counter

import pytest
from elasticd_planner.grouping.best_partitions import BestPartitions, possible, tractable
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.test_bound import groupings

SLOWDOWN = {1: 3.7, 2: 1.9, 3: 1.4, 4: 1.0}
RATES = st.lists(st.sampled_from([1.0, 1.1, 1.3, 2.0]), min_size=1, max_size=6)


def pace(rates: list[float]) -> float:
    return 1 / (SLOWDOWN[len(rates)] * (0.5 * max(rates) + 0.5 * sum(rates) / len(rates)))


@given(RATES)
def test_of_given_sizes_the_groups_reach_what_any_do(rates: list[float]) -> None:
    classes = sorted(set(rates))
    counts = tuple(rates.count(rate) for rate in classes)
    widths = [width for width in SLOWDOWN if width <= len(rates)]
    taken = possible(counts, widths)
    members = [[rate for rate, n in zip(classes, t, strict=True) for _ in range(n)] for t in taken]
    paces = dict(zip(taken, map(pace, members), strict=True))
    leading = BestPartitions(counts, widths, taken, list(paces.values()))
    best: dict[tuple[int, ...], float] = {}
    for groups in groupings(tuple(range(len(rates)))):
        made = Counter(map(len, groups))
        key = tuple(made[width] for width in widths)
        reach = sum(pace(sorted(rates[i] for i in group)) for group in groups)
        best[key] = max(best.get(key, -math.inf), reach)
    assert leading.reached == pytest.approx(best)
    for division in leading.divisions():
        sizes = Counter(map(sum, division))
        assert all(
            sum(column) <= count for column, count in zip(zip(*division, strict=True), counts, strict=True)
        )
        reach = sum(paces[group] for group in division)
        assert reach == pytest.approx(best[tuple(sizes[width] for width in widths)])


def test_a_node_of_very_many_unlike_devices_is_left_to_the_listing() -> None:
    assert tractable((1,) * 8, (1, 2, 4, 8))
    assert not tractable((1,) * 16, (1, 2, 4, 8))
