"""Every order of stages at once, against permutations one by one."""

import itertools
import math

import numpy as np
import pytest
from elasticd_planner.cost.pipeline_time import Formula
from elasticd_planner.grouping.group_types import Column, Rules
from elasticd_planner.search.pools.pipeline_candidates import Ordering
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples

ROOMS = st.lists(st.integers(0, 6), min_size=5, max_size=5)


@st.composite
def columns(draw: st.DrawFn) -> Column:
    most, first = draw(ROOMS), draw(ROOMS)
    return Column(
        block=draw(st.sampled_from([1.0, 1.3, 2.1, 4.0])),
        embed=draw(st.sampled_from([0.0, 0.5])),
        head=draw(st.sampled_from([0.0, 0.7])),
        most=tuple(most),
        most_first=tuple(map(min, most, first)),
    )


def rooms(stages: tuple[int, ...], listed: list[Column], rules: Rules, cap: float) -> list[int]:
    """Layers that each stage may have, the first stage first."""
    found = []
    for position, index in enumerate(stages):
        column, behind = listed[index], len(stages) - 1 - position
        fixed = (column.embed if position == 0 else 0.0) + (rules.hop if behind else column.head)
        most = (column.most_first if position == 0 else column.most)[behind]
        found.append(min(math.floor((cap - fixed) / column.block * (1 + 1e-9)), most, rules.layers))
    return found


@settings(max_examples=examples(80))
@given(st.data())
def test_the_most_layers_are_those_of_the_best_permutation(data: st.DataObject) -> None:
    listed = data.draw(st.lists(columns(), min_size=1, max_size=3))
    counts = [data.draw(st.integers(1, 2)) for _ in listed]
    hop = data.draw(st.sampled_from([0.0, 0.2]))
    rules = Rules(layers=data.draw(st.integers(2, 9)), hop=hop, timing=Formula(), deep=False, most=50, each=50)
    caps = np.array(sorted(data.draw(st.lists(st.floats(1, 12), min_size=1, max_size=3, unique=True))))
    made = Ordering(listed, counts, rules, caps)
    for row, vector in enumerate(itertools.product(*(range(n + 1) for n in counts))):
        stages = tuple(index for index, n in enumerate(vector) for _ in range(n))
        if not 1 <= len(stages) <= min(5, rules.layers):
            continue
        for at, cap in enumerate(caps):
            possible = [rooms(order, listed, rules, cap) for order in set(itertools.permutations(stages))]
            best = max((sum(layers) for layers in possible if min(layers) >= 1), default=-1)
            assert max(int(made.total[row, at]), -1) == best
            if best < rules.layers:
                continue
            order = made.order(row, at)
            assert sorted(order) == sorted(stages)
            layers = rooms(order, listed, rules, cap)
            assert sum(layers) == best
            # The cheapest stages are filled first, each having one layer at least.
            left, seconds = rules.layers - len(order), hop * (len(order) - 1)
            for place in sorted(range(len(order)), key=lambda i: listed[order[i]].block):
                more = min(layers[place] - 1, left)
                left -= more
                seconds += (1 + more) * listed[order[place]].block
            seconds += listed[order[0]].embed + listed[order[-1]].head
            assert made.sums(np.array([row]), np.array([at]))[0] == pytest.approx(seconds)
