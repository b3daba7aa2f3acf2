"""Packed batches: each token once, in rows that lanes hold, whole or cut, over one pipeline or several."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from elasticd_planner.batching.packed_batch import (
    CutOptions,
    NoRoom,
    nodes_of,
    packed_batch_plan,
    planned_slowdown,
    row_capacity,
)
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, BatchRow, SequencePiece
from elasticd_planner.spec.plan import PackedLane, Pipeline, Plan, Stage
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import played_rows
from tests.planner.models import planned, plans
from tests.planner.packed_rules import check_batch
from tests.sizes import examples

CUTS = CutOptions(least=1, fixed=2000)


def lanes(count: int, micro_batches: int, first: int = 0, stages: int = 1) -> Pipeline:
    """A pipeline of so many lanes of one device, four on a node, and so many micro-batches in each."""
    parts = []
    for stage in range(stages):
        numbers = range(first + stage * count, first + (stage + 1) * count)
        devices = tuple(f"n{n // 4}/{n % 4}" for n in numbers)
        widths = (1,) * count
        parts.append(Stage(start=stage, stop=stage + 1, devices=devices, shares=(1,) * count, lanes=widths))
    rows = (micro_batches,) * count
    return Pipeline(stages=tuple(parts), micro_batches=sum(rows), rows=rows)


def dealt(
    plan: Plan, tokens: list[int], capacity: int, cut: CutOptions | None = CUTS, **rest: object
) -> BatchPlan:
    samples = list(range(100, 100 + len(tokens)))
    lengths = BatchLengths(tokens=tuple(tokens), linear=50)
    made = packed_batch_plan(plan, 3, samples, lengths, capacity, cut=cut, **rest)  # type: ignore[arg-type]
    check_batch(made, samples, lengths, capacity)
    return made


def pieces(rows: tuple[BatchRow, ...]) -> list[SequencePiece]:
    return [piece for row in rows for lane in row.lanes for piece in lane]


@settings(max_examples=examples(300))
@given(plans(), st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(200, 400), st.booleans())
def test_each_token_is_dealt_once_under_any_plan(made: Plan, tokens: list[int], most: int, cut: bool) -> None:
    batch = dealt(made, tokens, most, CUTS if cut else None)
    assert (batch.step, batch.plan, batch.packed) == (3, made.number, True)
    length = {}
    for piece in pieces(tuple(row for rows in batch.pipelines for row in rows)):
        length[piece.sample] = length.get(piece.sample, 0) + piece.tokens
    assert length == {100 + index: count for index, count in enumerate(tokens)}


def test_a_sequence_longer_than_any_lane_is_cut_over_a_pipeline() -> None:
    batch = dealt(planned(lanes(3, 1)), [100], 40)
    assert [piece.tokens for piece in pieces(batch.pipelines[0])] == [34, 32, 34]


def test_a_pipeline_of_several_stages_has_even_rows() -> None:
    draw = np.random.default_rng(2)
    tokens = np.clip(draw.lognormal(5, 1, 80), 4, 1500).astype(int).tolist()
    rows = dealt(planned(lanes(4, 1, stages=2)), tokens, 2048).pipelines[0]
    cost = [[sum(p.tokens * (50 + p.length) for p in lane) for lane in row.lanes] for row in rows]
    mean = sum(map(sum, cost)) / 4 / len(rows)
    assert all(max(row) <= 1.1 * max(mean, sum(row) / 4) for row in cost)


def test_a_sequence_goes_to_a_pipeline_that_holds_it() -> None:
    plan = planned(lanes(1, 1), lanes(4, 1, 4), lanes(2, 1, 8))
    batch = dealt(plan, [10, 150, 10], 40)
    assert {piece.sample for piece in pieces(batch.pipelines[1])} == {101}


def test_a_sequence_that_no_lanes_hold_is_refused_by_name() -> None:
    plan = planned(lanes(2, 1), lanes(3, 1, 4))
    said = "step 3: sample 101 has 125 tokens, and no pipeline's lanes hold more than 120 in a row"
    with pytest.raises(Invalid, match=said):
        dealt(plan, [10, 125], 40)
    with pytest.raises(Invalid, match="step 3: sample 101 has 41 tokens, a row at most 40"):
        dealt(plan, [10, 41], 40, cut=None)


def test_pipelines_get_work_by_the_speed_of_their_lanes() -> None:
    plan = planned(lanes(4, 1), lanes(4, 1, 4))
    batch = dealt(plan, [30] * 600, 400, slowdown=(64,) * 4 + (128,) * 4)
    quick, slow = (sum(piece.tokens for piece in pieces(rows)) for rows in batch.pipelines)
    assert quick == pytest.approx(2 * slow, rel=0.02)


def test_without_slowdowns_lanes_get_work_by_the_plans_micro_batches() -> None:
    plan = planned(Pipeline(stages=lanes(2, 1).stages, micro_batches=4, rows=(3, 1)))
    for cut in (CUTS, None):
        rows = dealt(plan, [20] * 400, 2000, cut).pipelines[0]
        tokens = [sum(piece.tokens for row in rows for piece in row.lanes[lane]) for lane in (0, 1)]
        assert tokens[0] == pytest.approx(3 * tokens[1], rel=0.05)


def test_a_slow_lane_gets_fewer_tokens_also_of_whole_sequences() -> None:
    plan = planned(lanes(4, 1))
    rows = dealt(plan, [20] * 700, 4000, None, slowdown=(64, 64, 64, 128)).pipelines[0]
    tokens = [sum(piece.tokens for row in rows for piece in row.lanes[lane]) for lane in range(4)]
    assert tokens[3] == pytest.approx(tokens[0] / 2, rel=0.03)


def test_lanes_may_hold_unlike_numbers_of_tokens() -> None:
    plan = planned(packed_lanes(20, 80, 40))
    samples, lengths = list(range(30)), BatchLengths(tokens=(20,) * 29 + (70,), linear=50)
    for cut in (CUTS, None):
        made = packed_batch_plan(plan, 0, samples, lengths, 80, cut=cut)
        check_batch(made, samples, lengths, ((20, 80, 40),))


def test_cutting_ends_a_step_sooner_than_whole_sequences() -> None:
    plan, draw = planned(lanes(8, 1)), np.random.default_rng(1)
    tokens = np.clip(draw.lognormal(5, 1.2, 60), 4, 4000).astype(int).tolist()
    whole, cut = (
        played_rows.seconds(dealt(plan, tokens, 4096, options).pipelines[0], (64,) * 8, 50, 2000)
        for options in (None, CUTS)
    )
    work = sum(each * (50 + each) for each in tokens) / 8
    assert cut < 0.7 * whole
    assert cut < 1.1 * work


def test_a_batch_that_breaks_a_rule_is_refused() -> None:
    plan, lengths = planned(lanes(2, 1)), BatchLengths(tokens=(8, 6), linear=50)
    whole = {100: SequencePiece.whole(100, 8), 101: SequencePiece.whole(101, 6)}
    half = SequencePiece(100, 8, 0, 2), SequencePiece(100, 8, 2, 4)

    def batch(*rows: tuple[tuple[SequencePiece, ...], ...]) -> BatchPlan:
        made = tuple(BatchRow(lanes=row) for row in rows)
        return BatchPlan(step=1, plan=plan.number, pipelines=(made,), packed=True)

    check_batch(batch(((whole[100],), (whole[101],))), (100, 101), lengths, 8)
    check_batch(batch((half[:1], half[1:]), ((whole[101],), ())), (100, 101), lengths, 8)
    for wrong, said in (
        (batch(((whole[100],), ())), "sample 101 is not in it"),
        (batch((half[:1], (whole[101],)), (half[1:], ())), "sample 100 is in more than one row"),
        (batch((half[:1], (whole[101],))), "the pieces of sample 100 are not all its pairs, each once"),
        (batch((half[:1], (*half[1:], half[0]))), "the pieces of sample 100 are not all its pairs, each once"),
        (batch(((whole[100], whole[101]), ())), "row 0 of lane 0 of pipeline 0 has 14 tokens, and holds 8"),
    ):
        with pytest.raises(Invalid, match=f"step 1: {said}"):
            check_batch(wrong, (100, 101), lengths, 8)


def test_what_does_not_fit_together_is_refused() -> None:
    plan = planned(lanes(2, 1))
    with pytest.raises(Invalid, match="1 lengths for 2 samples"):
        packed_batch_plan(plan, 3, (1, 2), BatchLengths(tokens=(4,), linear=1))
    with pytest.raises(Invalid, match="sample 1 has 0 tokens"):
        packed_batch_plan(plan, 3, (1,), BatchLengths(tokens=(0,), linear=1))
    for wrong in ({"slowdown": (64, 64, 64)}, {"slowdown": (64, 0)}):
        with pytest.raises(Invalid, match="module model has 2 lanes"):
            packed_batch_plan(plan, 3, (1,), BatchLengths(tokens=(4,), linear=1), cut=CUTS, **wrong)
    with pytest.raises(Invalid, match="the least piece must be at least 1"):
        CutOptions(least=0)


def packed_lanes(*capacity: int, slowdown: tuple[int, ...] = ()) -> Pipeline:
    """A pipeline of lanes that hold so many tokens each."""
    slow = slowdown or (64,) * len(capacity)
    packed = tuple(PackedLane(capacity=room, slowdown=each) for room, each in zip(capacity, slow, strict=True))
    return msgspec.structs.replace(lanes(len(capacity), 1), packed=packed)


def test_a_row_has_what_memory_holds_and_no_more_than_is_asked_for() -> None:
    plan, lengths = planned(lanes(2, 1)), BatchLengths(tokens=(4, 9), linear=1)
    assert row_capacity(plan, lengths) == [9, 9]  # a padded micro-batch of these
    assert row_capacity(plan, lengths, 30) == [30, 30]
    plan = planned(packed_lanes(7, 20))
    assert row_capacity(plan, lengths) == [7, 9]
    assert row_capacity(plan, lengths, 30) == [7, 20]


def test_lanes_of_unequal_memory_hold_each_what_they_can() -> None:
    plan, samples = planned(packed_lanes(40, 10, 100, slowdown=(64, 64, 128))), tuple(range(6))
    lengths = BatchLengths(tokens=(140, 90, 40, 30, 8, 7), linear=50)
    for cut in (CUTS, CutOptions(least=1, fixed=0)):
        batch = packed_batch_plan(plan, 1, samples, lengths, 400, cut=cut)
        check_batch(batch, samples, lengths, [[40, 10, 100]])
    with pytest.raises(NoRoom, match="151 tokens, and no pipeline's lanes hold more than 150 in a row"):
        packed_batch_plan(plan, 1, (5,), BatchLengths(tokens=(151,), linear=50), 400, cut=CUTS)
    with pytest.raises(NoRoom, match="140 tokens, a row at most 100"):
        packed_batch_plan(plan, 1, samples, lengths, 400)


def test_a_packed_plan_says_which_shares_lanes_get_at_first() -> None:
    plan = planned(packed_lanes(9000, 9000, slowdown=(64, 192)))
    assert planned_slowdown(plan.pipelines) == [64, 192]
    made = packed_batch_plan(plan, 1, (1,), BatchLengths(tokens=(4000,), linear=50), 9000, cut=CUTS)
    assert [piece.tokens for piece in pieces(made.pipelines[0])] == [3000, 1000]


def test_lanes_are_on_the_node_of_their_first_device() -> None:
    assert nodes_of(lanes(6, 1, 2)) == (0, 0, 1, 1, 1, 1)


def test_a_lane_with_half_the_micro_batches_counts_as_twice_as_slow() -> None:
    assert planned_slowdown((lanes(1, 4), lanes(1, 2), lanes(1, 4))) == [64, 128, 64]
