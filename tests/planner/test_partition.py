"""Pipelines of counts and their partition, deals, parts in 64ths, and assignments, against enumeration."""

import itertools
import math

import numpy as np
import pytest
from elasticd_planner.cost.pipeline_time import Formula
from elasticd_planner.cost.table_cost import balanced
from elasticd_planner.grouping.group_types import NEVER, Column, Rules
from elasticd_planner.placement.state_movement import assign
from elasticd_planner.search.balance.micro_batch_split import Line, pareto, split_by_lines
from elasticd_planner.search.pools.pipeline_candidates import PipelineCandidates
from elasticd_planner.search.pools.pipeline_partition import Partition
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.brute import compositions
from tests.sizes import examples


@settings(max_examples=examples(40))
@given(st.data(), st.integers(1, 5))
def test_a_partition_takes_the_most_that_any_does(data: st.DataObject, pipelines: int) -> None:
    dims = tuple(data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=2)))
    size = math.prod(dims)
    values = data.draw(st.lists(st.sampled_from([NEVER, 1, 2, 3, 5, 8]), min_size=size, max_size=size))
    single = np.array(values, dtype=np.int64).reshape(dims)
    single[(0,) * len(dims)] = NEVER  # a pipeline has a group
    found = Partition(single)

    def most(left: tuple[int, ...], count: int) -> int:
        if not count:
            return 0
        best = NEVER * 10
        for taken in itertools.product(*(range(n + 1) for n in left)):
            rest = tuple(a - b for a, b in zip(left, taken, strict=True))
            best = max(best, int(single[taken]) + most(rest, count - 1))
        return best

    least = most(tuple(n - 1 for n in dims), pipelines)
    if least > 0:
        assert found.most(pipelines) == least
        parts = found.split(pipelines)
        assert sum(int(single[part]) for part in parts) == least
        assert all(sum(p[axis] for p in parts) < dims[axis] for axis in range(len(dims)))
    else:
        assert found.most(pipelines) < 0


@settings(max_examples=examples(60))
@given(st.data())
def test_lines_of_pipelines_are_real_and_the_best_layers_are_among_them(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 7))
    columns = [
        Column(
            block=data.draw(st.sampled_from([1.0, 1.3, 2.1, 4.0])),
            embed=data.draw(st.sampled_from([0.0, 0.4])),
            head=data.draw(st.sampled_from([0.0, 0.7, 9.3])),
            most=tuple(sorted((data.draw(st.integers(0, 7)) for _ in range(5)), reverse=True)),
            most_first=(0,) * 5,
        )
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    columns = [
        Column(block=c.block, embed=c.embed, head=c.head, most=c.most, most_first=c.most) for c in columns
    ]
    rules = Rules(layers=layers, hop=0.0, timing=Formula(), deep=False, most=100, each=100)
    shapes = PipelineCandidates(columns, [data.draw(st.integers(1, 2)) for _ in columns], rules)
    limit = data.draw(st.floats(3, 120))
    found = shapes.micro_batches(limit)
    for counts in itertools.product(*(range(n) for n in found.shape)):
        if not sum(counts):
            assert found[counts] == NEVER
            continue
        stages = [index for index, count in enumerate(counts) for _ in range(count)]
        best = NEVER
        for order in set(itertools.permutations(stages)):
            for split in compositions(layers, len(order)):
                room = [columns[c].most[len(order) - 1 - p] for p, c in enumerate(order)]
                if all(n <= m for n, m in zip(split, room, strict=True)):
                    times = [n * columns[c].block for n, c in zip(split, order, strict=True)]
                    times[0] += columns[order[0]].embed
                    times[-1] += columns[order[-1]].head
                    best = max(best, math.floor((limit - sum(times)) / max(times) + 1 + 1e-9))
        if found[counts] != NEVER:
            assert 1 <= found[counts] <= best
        if len(set(stages)) == 1 and best >= 1 and all(m >= layers for c in columns for m in c.most):
            assert found[counts] == best


@pytest.mark.parametrize(("count", "least"), [(2, 19.0), (3, 13.0), (8, 10.3)])
def test_the_last_stage_holds_a_layer_beside_a_head_of_many(count: int, least: float) -> None:
    column = Column(block=1.0, embed=0.0, head=9.3, most=(28,) * count, most_first=(28,) * count)
    rules = Rules(layers=28, hop=0.0, timing=Formula(), deep=False, most=16, each=16)
    shapes = PipelineCandidates([column], [count], rules)
    deepest = int(np.flatnonzero(shapes.depth[shapes.rows] == count)[0])
    assert shapes.caps[deepest].min() == pytest.approx(least)


@settings(max_examples=examples(60))
@given(st.data(), st.integers(1, 9))
def test_a_deal_is_the_best_of_all_splits(data: st.DataObject, total: int) -> None:
    lines = [
        Line(
            caps=np.array(data.draw(st.lists(st.sampled_from([1.0, 1.5, 2.2]), min_size=2, max_size=2))),
            sums=np.array(data.draw(st.lists(st.sampled_from([2.0, 3.7, 6.0]), min_size=2, max_size=2))),
            least=data.draw(st.integers(1, 3)),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    given_out = split_by_lines(lines, total)
    options = [
        split
        for split in itertools.product(range(1, total + 1), repeat=len(lines))
        if sum(split) == total and all(m >= line.least for m, line in zip(split, lines, strict=True))
    ]
    if not options:
        assert given_out is None
        return

    def slowest(split: tuple[int, ...]) -> float:
        return max(line.seconds(m) for m, line in zip(split, lines, strict=True))

    assert given_out is not None
    assert given_out in options
    assert slowest(given_out) == pytest.approx(min(map(slowest, options)))


def test_lines_that_are_never_best_are_dropped() -> None:
    caps, sums = np.array([2.0, 1.0, 1.5, 3.0]), np.array([5.0, 6.0, 7.0, 5.0])
    kept = pareto(caps, sums)
    assert caps[kept].tolist() == [1.0, 2.0]
    assert sums[kept].tolist() == [6.0, 5.0]


@given(st.lists(st.sampled_from([1.0, 1.4, 2.57, 5.0]), min_size=1, max_size=3), st.integers(4, 12))
def test_parts_are_the_best_of_all(rates: list[float], parts: int) -> None:
    found = balanced(rates, parts)
    assert found is not None
    assert sum(found) == parts
    assert min(found) >= 1

    def slowest(given_out: tuple[int, ...]) -> float:
        return max(n * rate for n, rate in zip(given_out, rates, strict=True))

    assert slowest(found) == pytest.approx(min(map(slowest, compositions(parts, len(rates)))))
    most = -(-parts // len(rates))
    even = balanced(rates, parts, most)
    assert even is not None
    assert max(even) <= most
    assert balanced(rates, parts, (parts - 1) // len(rates)) is None


@settings(max_examples=examples(20))
@given(st.data())
def test_many_devices_are_assigned_as_well_as_few(data: st.DataObject) -> None:
    """Beyond eight rows another algorithm takes over: padded with rows that are never wanted it must agree."""
    columns = data.draw(st.integers(1, 5))
    rows = data.draw(st.integers(columns, 6))
    costs = [[float(data.draw(st.integers(0, 20))) for _ in range(columns)] for _ in range(rows)]
    few = sum(costs[row][column] for column, row in enumerate(assign(costs)))
    padded = costs + [[1e6] * columns for _ in range(9)]
    chosen = assign(padded)
    assert len(set(chosen)) == columns
    assert sum(padded[row][column] for column, row in enumerate(chosen)) == few
