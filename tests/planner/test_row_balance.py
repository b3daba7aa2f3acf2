"""Rows of equal cost for pipelines of several stages: every pair once, within memory, each row even."""

from __future__ import annotations

import numpy as np
import pytest
from elasticd_planner.batching.division import SplitCost
from elasticd_planner.batching.lane_tree import LaneSet, LaneTree
from elasticd_planner.batching.packed_batch import rows_of
from elasticd_planner.batching.row_balance import balanced, pipeline_time
from elasticd_planner.numeric import Ints
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.longest_paths import ends
from tests.planner.test_sequence_split import Problem, drawn, problems
from tests.sizes import examples, number


@settings(max_examples=examples(300))
@given(problems(), st.integers(2, 4))
def test_each_pair_is_on_one_lane_in_one_row_within_memory(problem: Problem, stages: int) -> None:
    lengths, lanes, cost = problem
    tree = LaneTree(lanes)
    found = balanced(lengths, tree, cost, stages)
    if found is None:
        assert len(lengths) <= 2 * len(tree) or lengths.max() > max(lanes.capacity)
        return
    made = rows_of(found, list(range(len(lengths))), lengths, tree)
    borders: dict[int, list[tuple[int, int]]] = {}
    rows: dict[int, set[int]] = {}
    for index, row in enumerate(made):
        assert any(row.lanes)
        for own, most in zip(row.lanes, lanes.capacity, strict=True):
            assert sum(piece.tokens for piece in own) <= most
            for piece in own:
                borders.setdefault(piece.sample, []).append((piece.start, piece.stop))
                rows.setdefault(piece.sample, set()).add(index)
    for lane in range(len(lanes.nodes)):
        filled = [bool(row.lanes[lane]) for row in made]
        assert filled == sorted(filled, reverse=True)
    assert sorted(borders) == list(range(len(lengths)))
    assert all(len(each) == 1 for each in rows.values())
    for sample, each in borders.items():
        ends = [0, *(stop for _, stop in sorted(each))]
        assert [*(start for start, _ in sorted(each)), (lengths[sample] + 1) // 2] == ends


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 6))
def test_a_pipelines_time_is_the_longest_path_through_its_schedule(rows: list[int], stages: int) -> None:
    forward = [list(rows)] * stages
    backward = [[2 * each for each in rows]] * stages
    assert pipeline_time(rows, stages) == max(ends(forward, backward).values()) // (3 * stages)


def times(lengths: Ints, tree: LaneTree, cost: SplitCost, stages: int) -> Ints:
    """The time of each row."""
    found = balanced(lengths, tree, cost, stages)
    assert found is not None
    work = np.zeros((1 + int(found.row.max()), len(tree)))
    tokens = found.tokens(lengths) * (cost.linear + lengths[found.sequence])
    np.add.at(work, (found.row, found.place), tokens * np.array(tree.slowdown)[found.place] / 64)
    return work.max(1) + cost.fixed  # type: ignore[no-any-return]


@pytest.mark.parametrize(("slow", "most"), [(0, 1.06), (2, 1.08)])
def test_rows_of_16_lanes_in_4_stages_take_little_more_than_equal_rows(slow: int, most: float) -> None:
    cost, found = SplitCost(linear=12 * 4096, fixed=1000 * 12 * 4096), []
    for seed in range(number(12, 3)):
        lengths, tree = drawn(seed, 512, slow, 16)
        lengths = np.minimum(lengths, 30_000)
        rows = times(lengths, tree, cost, 4)
        work = int((lengths * (cost.linear + lengths)).sum()) / sum(64 / each for each in tree.slowdown)
        even = (work / len(rows) + cost.fixed) * (len(rows) + 3) / 4
        found.append(pipeline_time(rows.astype(int).tolist(), 4) / even)
    assert np.mean(found) <= most


def test_more_stages_make_more_rows() -> None:
    lengths, tree = drawn(1, 512, 0, 16)
    cost = SplitCost(linear=12 * 4096, fixed=1000 * 12 * 4096)
    assert len(times(lengths, tree, cost, 8)) > len(times(lengths, tree, cost, 2))


def test_what_no_lanes_hold_has_no_even_rows() -> None:
    tree = LaneTree(LaneSet(nodes=(0, 0), capacity=(10, 10), slowdown=(64, 64)))
    assert balanced(np.array([4, 24]), tree, SplitCost(linear=1), 2) is None
