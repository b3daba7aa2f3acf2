"""Sequences divided over lanes: every pair once, within memory, without gaps, and near the best that there
is."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from elasticd_planner.batching.division import SequenceDivision, SplitCost, bound, seconds
from elasticd_planner.batching.lane_tree import LaneSet, LaneTree
from elasticd_planner.batching.packed_batch import rows_of
from elasticd_planner.batching.sequence_split import divided
from elasticd_planner.numeric import Ints
from elasticd_planner.spec.batch import BatchRow, SequencePiece
from elasticd_planner.value import Invalid
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.planner import played_rows
from tests.sizes import examples, number

Problem = tuple[Ints, LaneSet, SplitCost]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Sequences that a pipeline's lanes hold: lanes of unlike memory and speed, on nodes of unlike sizes."""
    lanes = draw(st.integers(1, 12))
    capacity = draw(st.lists(st.integers(16, 400), min_size=lanes, max_size=lanes))
    slowdown = draw(st.lists(st.sampled_from((64, 64, 64, 40, 96, 200, 1024)), min_size=lanes, max_size=lanes))
    nodes = sorted(draw(st.lists(st.integers(0, 3), min_size=lanes, max_size=lanes)))
    longest = sum(each // 2 * 2 for each in capacity)
    lengths = draw(
        st.lists(st.integers(1, longest) | st.integers(1, min(60, longest)), min_size=1, max_size=40)
    )
    cost = SplitCost(
        linear=draw(st.sampled_from((1, 20, 5000))),
        fixed=draw(st.sampled_from((0, 3000, 10**6))),
        least=draw(st.sampled_from((1, 4, 256))),
    )
    return (
        np.array(lengths),
        LaneSet(nodes=tuple(nodes), capacity=tuple(capacity), slowdown=tuple(slowdown)),
        cost,
    )


def rows(found: SequenceDivision, lengths: Ints, tree: LaneTree) -> tuple[BatchRow, ...]:
    return rows_of(found, list(range(len(lengths))), lengths, tree)


@settings(max_examples=examples(400))
@given(problems())
def test_each_pair_is_on_one_lane_in_one_row_within_memory_and_no_lane_has_a_gap(problem: Problem) -> None:
    lengths, lanes, cost = problem
    tree = LaneTree(lanes)
    made = rows(divided(lengths, tree, cost), lengths, tree)
    pieces: dict[int, list[SequencePiece]] = {}
    where: dict[int, set[int]] = {}
    for index, row in enumerate(made):
        for lane, own in enumerate(row.lanes):
            assert sum(piece.tokens for piece in own) <= lanes.capacity[lane]
            for piece in own:
                pieces.setdefault(piece.sample, []).append(piece)
                where.setdefault(piece.sample, set()).add(index)
    assert sorted(pieces) == list(range(len(lengths)))
    assert all(len(each) == 1 for each in where.values())
    for sample, each in pieces.items():
        borders = sorted((piece.start, piece.stop) for piece in each)
        assert [0, *(stop for _, stop in borders)] == [
            *(start for start, _ in borders),
            (lengths[sample] + 1) // 2,
        ]
        assert {piece.length for piece in each} == {lengths[sample]}
        assert all(piece.start < piece.stop for piece in each)
    for lane in range(len(lanes.nodes)):
        filled = [bool(row.lanes[lane]) for row in made]
        assert filled == sorted(filled, reverse=True)


#: Even rows cut a sequence over lanes that are no neighbours: a fast one and two slow ones.
APART = (
    np.array([1] * 10 + [27, 29, 31]),
    LaneSet(nodes=(0,) * 6, capacity=(16,) * 6, slowdown=(64, 64, 64, 40, 96, 96)),
    SplitCost(linear=1, fixed=0, least=4),
)


@settings(max_examples=examples(300))
@example(APART)
@given(problems())
def test_the_time_is_what_playing_the_rows_by_events_says(problem: Problem) -> None:
    lengths, lanes, cost = problem
    tree = LaneTree(lanes)
    found = divided(lengths, tree, cost)
    played = played_rows.seconds(rows(found, lengths, tree), lanes.slowdown, cost.linear, cost.fixed)
    most_rows = 1 + int(found.row.max())
    assert played - most_rows <= seconds(found, lengths, tree, cost) <= played
    assert played >= bound(lengths, tree, cost)


@settings(max_examples=examples(300))
@given(problems())
def test_pieces_are_no_shorter_than_the_least_unless_memory_asks(problem: Problem) -> None:
    lengths, lanes, cost = problem
    found = divided(lengths, LaneTree(lanes), cost)
    smallest = np.full(len(lengths), np.iinfo(np.int64).max)
    np.minimum.at(smallest, found.sequence, found.stop - found.start)
    cut = np.bincount(found.sequence, minlength=len(lengths)) > 1
    fits = lengths <= min(lanes.capacity)
    assert (smallest[cut & fits] >= cost.least).all()


@settings(max_examples=examples(400))
@given(st.lists(st.integers(25, 400), min_size=1, max_size=5), st.integers(2, 4), st.sampled_from((0, 20_000)))
def test_small_steps_end_within_a_tenth_of_the_best_laminar_division(
    ls: list[int], count: int, fixed: int
) -> None:
    """Against every assignment of the sequences to vertices and rows."""
    lengths, capacity = np.array(ls) * 8, 3300
    tree = LaneTree(LaneSet(nodes=(0,) * count, capacity=(capacity,) * count, slowdown=(64,) * count))
    cost = SplitCost(linear=500, fixed=fixed, least=1)
    vertices = sorted({vertex for level in tree.levels for vertex in level})
    best = played_rows.best_laminar(lengths.tolist(), vertices, capacity - 8, cost.linear, fixed)
    assert seconds(divided(lengths, tree, cost), lengths, tree, cost) <= best * 11 / 10


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_step_of_long_sequences_is_no_slower_than_any_uniform_degree(count: int) -> None:
    """`static`: each sequence cut over as many lanes as every other, the costliest first to the least busy
    set."""
    draw = np.random.default_rng(count)
    cost = SplitCost(linear=4096, fixed=10**7)
    tree = LaneTree(LaneSet(nodes=(0,) * count, capacity=(8192,) * count, slowdown=(64,) * count))
    for _ in range(number(40, 10)):
        lengths = draw.integers(512 * count, 6000, 3 * count)
        ours = seconds(divided(lengths, tree, cost), lengths, tree, cost)
        for width in (1 << k for k in range(count.bit_length())):
            loads, tokens = [0] * (count // width), [0] * (count // width)
            for length in sorted(lengths.tolist(), reverse=True):
                at = loads.index(min(loads))
                loads[at] += length * (cost.linear + length) // width
                tokens[at] += length
            rows = [-(-each // (8192 * width)) * cost.fixed for each in tokens]
            assert ours <= 1.02 * max(a + b for a, b in zip(loads, rows, strict=True))


def drawn(seed: int, count: int, slow: int = 0, lanes: int = 64) -> tuple[Ints, LaneTree]:
    draw = np.random.default_rng(seed)
    slowdown = np.full(lanes, 64)
    slowdown[draw.choice(lanes, slow, replace=False)] = draw.choice((96, 128, 165), slow)
    nodes = tuple((np.arange(lanes) // 8).tolist())
    tree = LaneTree(LaneSet(nodes=nodes, capacity=(8192,) * lanes, slowdown=tuple(slowdown.tolist())))
    return np.clip(draw.lognormal(7.6, 1.3, count), 32, 131072).astype(np.int64), tree


@pytest.mark.parametrize("slow", [0, 3])
def test_a_step_of_64_lanes_ends_near_its_bound(slow: int) -> None:
    cost = SplitCost(linear=12 * 4096, fixed=1000 * 12 * 4096)
    for seed in range(number(20, 4)):
        lengths, tree = drawn(seed, 512, slow)
        assert seconds(divided(lengths, tree, cost), lengths, tree, cost) <= 1.06 * bound(lengths, tree, cost)


def test_a_slow_lane_gets_a_share_by_its_speed() -> None:
    lengths = np.full(4, 4000)
    tree = LaneTree(LaneSet(nodes=(0,) * 4, capacity=(8192,) * 4, slowdown=(64, 64, 64, 128)))
    cost = SplitCost(linear=100, fixed=0)
    found = divided(lengths, tree, cost)
    tokens = np.bincount(found.place, weights=found.tokens(lengths))
    assert tokens[3] == pytest.approx(tokens[:3].mean() / 2, rel=0.05)


def test_a_faster_lane_does_not_make_the_step_longer() -> None:
    cost = SplitCost(linear=12 * 4096, fixed=1000 * 12 * 4096)
    for seed in range(number(40, 8)):
        lengths, tree = drawn(seed, 128, 4, 16)
        slowdown = list(tree.slowdown)
        before = seconds(divided(lengths, tree, cost), lengths, tree, cost)
        slowdown[slowdown.index(max(slowdown))] = 64
        quicker = LaneTree(LaneSet(nodes=(0,) * 8 + (1,) * 8, capacity=(8192,) * 16, slowdown=tuple(slowdown)))
        assert seconds(divided(lengths, quicker, cost), lengths, quicker, cost) <= 1.02 * before


def test_a_sequence_that_no_lanes_hold_is_refused() -> None:
    tree = LaneTree(LaneSet(nodes=(0, 0), capacity=(10, 10), slowdown=(64, 64)))
    with pytest.raises(Invalid, match="sequence 1 has 22 tokens, which no set of lanes holds"):
        divided(np.array([4, 22]), tree, SplitCost(linear=1))
    alone = LaneTree(LaneSet(nodes=(0,), capacity=(10,), slowdown=(64,)))
    with pytest.raises(Invalid, match="sequence 0 has 11 tokens, which no set of lanes holds"):
        divided(np.array([11]), alone, SplitCost(linear=1))


def test_a_sequence_that_fits_by_memory_alone_is_cut_by_memory() -> None:
    """A slow lane has to take more than its speed says, for the others hold no more."""
    tree = LaneTree(LaneSet(nodes=(0, 0), capacity=(100, 100), slowdown=(64, 640)))
    found = divided(np.array([200]), tree, SplitCost(linear=1))
    assert found.tokens(np.array([200])).tolist() == [100, 100]


def test_another_process_divides_alike() -> None:
    """With other hash seeds."""
    program = (
        "import hashlib, numpy as np; from tests.planner.test_sequence_split import *\n"
        "lengths, tree = drawn(3, 300, 3, 32)\n"
        "found = divided(lengths, tree, SplitCost(linear=5000, fixed=10**7))\n"
        "columns = (found.sequence, found.place, found.row, found.start, found.stop)\n"
        "print(hashlib.sha256(np.array(columns).tobytes()).hexdigest())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


def test_a_set_of_lanes_must_be_whole() -> None:
    with pytest.raises(Invalid, match="each needs a node, a capacity and a slowdown"):
        LaneSet(nodes=(0,), capacity=(1, 2), slowdown=(64,))
    with pytest.raises(Invalid, match="at least 1"):
        LaneSet(nodes=(0,), capacity=(1,), slowdown=(0,))
    with pytest.raises(Invalid, match="linear and the least piece"):
        SplitCost(linear=0)
