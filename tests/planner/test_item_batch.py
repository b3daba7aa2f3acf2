"""The items of a step: each goes to one lane, by need, cost and speed, the same on every rank."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from elasticd_planner.spec.batch import BatchPlan, BatchRow, SequencePiece, batch_plan
from elasticd_planner.spec.item_batch import GroupId, ItemBatch, ItemGroup, SampleItem, item_batch
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Place, Plan, Stage, Strategy
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.drawn_modules import LOSS, drawn_step


def pipeline(device: str, micro_batches: int) -> Pipeline:
    return Pipeline(
        stages=(Stage(start=0, stop=1, devices=(device,), shares=(1,)),), micro_batches=micro_batches
    )


def planned(weights: tuple[int, ...], micro_batches: tuple[int, ...] = (4,), **vision: Any) -> Plan:
    """A lane of the encoder with each of these weights, pipelines of the language model with so many
    micro-batches of one sample."""
    language = tuple(pipeline(f"b/{i}", count) for i, count in enumerate(micro_batches))
    encoders = tuple(pipeline(f"a/{i}", weight) for i, weight in enumerate(weights))
    strategy = Strategy(
        modules=(
            ModulePlan(module="language", pipelines=language),
            ModulePlan(module="vision", pipelines=encoders, items="images", **vision),
        ),
        edges=(Edge(source="vision", target="language"),),
    )
    return Plan(number=7, strategies=(strategy,), micro_batch=1, global_batch=sum(micro_batches))


def batch_of(plan: Plan) -> BatchPlan:
    return batch_plan(plan.view("language"), 3, range(plan.global_batch))


def loads(batch: ItemBatch) -> list[int]:
    """The items of each lane, or their rows where these are known."""
    return [
        sum(group.rows or len(group.items) for group in groups) for lanes in batch.pipelines for groups in lanes
    ]


def test_a_lane_that_goes_first_gets_an_item_however_slow_it_is() -> None:
    """The one that costs least, as soon as there is one."""
    plan = planned((1, 1, 1), (4,), ahead=4)
    counts, rows = {0: 0, 1: 1, 2: 1, 3: 0}, {SampleItem(1, 0): 5, SampleItem(2, 0): 3}
    slow = (64, 64, 1024)
    assert loads(item_batch(plan, "vision", batch_of(plan), counts, rows, slow)) == [5, 3, 0]
    assert loads(item_batch(plan, "vision", batch_of(plan), counts, rows, slow, (2,))) == [5, 0, 3]
    assert loads(item_batch(plan, "vision", batch_of(plan), dict.fromkeys(counts, 0), {}, slow, (2,))) == [
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("seed", range(30))
def test_every_item_is_dealt_once_and_groups_are_in_the_order_of_need(seed: int) -> None:
    step = drawn_step(seed)
    for batch in step.batches.values():
        if not isinstance(batch, ItemBatch):
            continue
        listed = [group for _, group in batch.walk()]
        assert all(len(group.items) == 1 for group in listed)
        loss = step.batches[LOSS]
        assert isinstance(loss, BatchPlan)
        for lanes in batch.pipelines:
            for groups in lanes:
                needs = [(group.micro_batch, group.pipeline, group.lanes) for group in groups]
                assert needs == sorted(needs)
        dealt = Counter(item for group in listed for item in group.items)
        assert not dealt or max(dealt.values()) == 1
        for group in listed:
            (lane,) = group.lanes
            micro = loss.pipelines[group.pipeline][group.micro_batch].lanes[lane]
            assert group.items[0].sample in [piece.sample for piece in micro]
        by_sample: dict[int, set[int]] = {}
        for item in dealt:
            by_sample.setdefault(item.sample, set()).add(item.number)
        for numbers in by_sample.values():
            assert numbers in ({-1}, {*range(len(numbers))})
        named = dict(batch.walk())
        for need, names in batch.needs.items():
            assert all(
                (named[name].pipeline, *named[name].lanes, named[name].micro_batch) == need for name in names
            )
        assert sum(map(len, batch.needs.values())) == len(listed)


def test_items_go_to_the_lane_that_is_done_first_and_costly_ones_go_first() -> None:
    plan = planned((1, 1), ahead=4)
    counts = {0: 1, 1: 0, 2: 2, 3: 1}
    rows = {SampleItem(0, 0): 10, SampleItem(2, 0): 30, SampleItem(2, 1): 20, SampleItem(3, 0): 25}
    batch = item_batch(plan, "vision", batch_of(plan), counts, rows)
    assert batch.pipelines == (
        ((ItemGroup((SampleItem(0, 0),), 0, (0,), 0, 10), ItemGroup((SampleItem(2, 0),), 0, (0,), 2, 30)),),
        ((ItemGroup((SampleItem(2, 1),), 0, (0,), 2, 20), ItemGroup((SampleItem(3, 0),), 0, (0,), 3, 25)),),
    )
    assert batch.of(Place(1, 0, 0)) == batch.pipelines[1][0]
    assert batch.needs == {
        (0, 0, 0): (GroupId("vision", 0, 0, 0),),
        (0, 0, 2): (GroupId("vision", 0, 0, 1), GroupId("vision", 1, 0, 0)),
        (0, 0, 3): (GroupId("vision", 1, 0, 1),),
    }


def test_a_window_is_dealt_before_the_next_one() -> None:
    """With `ahead` of 1 the costliest item of the last micro-batch comes last."""
    plan = planned((1, 1), micro_batches=(2,), ahead=1)
    rows = {SampleItem(0, 0): 1, SampleItem(0, 1): 2, SampleItem(1, 0): 100}
    batch = item_batch(plan, "vision", batch_of(plan), {0: 2, 1: 1}, rows)
    assert [group.items for group in batch.pipelines[0][0]] == [(SampleItem(0, 1),)]
    assert [group.items for group in batch.pipelines[1][0]] == [(SampleItem(0, 0),), (SampleItem(1, 0),)]
    wide = item_batch(
        planned((1, 1), micro_batches=(2,), ahead=2), "vision", batch_of(plan), {0: 2, 1: 1}, rows
    )
    assert [group.items for group in wide.pipelines[0][0]] == [(SampleItem(1, 0),)]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(16, 640), st.integers(1, 12))
def test_a_lane_gets_items_by_its_weight_and_its_speed(a: int, b: int, slowdown: int, ahead: int) -> None:
    plan = planned((a, b), micro_batches=(12,), ahead=ahead)
    counts = dict.fromkeys(range(12), 9)
    batch = item_batch(plan, "vision", batch_of(plan), counts, None, (64, slowdown))
    first, second = loads(batch)
    assert first + second == 108
    speeds = a / 64, b / slowdown
    assert first == pytest.approx(108 * speeds[0] / sum(speeds), abs=1)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([32, 64, 64, 192])), min_size=1, max_size=9),
    st.lists(st.integers(1, 50), max_size=30),
)
def test_each_item_in_turn_goes_to_the_first_of_the_lanes_that_would_be_done_first(
    lanes: list[tuple[int, int]], costs: list[int]
) -> None:
    weights, slowdown = tuple(weight for weight, _ in lanes), tuple(slow for _, slow in lanes)
    plan = planned(weights, micro_batches=(1,))
    rows = {SampleItem(0, number): cost for number, cost in enumerate(costs)}
    batch = item_batch(plan, "vision", batch_of(plan), {0: len(costs)}, rows, slowdown)
    given_to = {item: name.pipeline for name, group in batch.walk() for item in group.items}
    had = [0] * len(lanes)
    for item in sorted(rows, key=lambda item: (-rows[item], item)):
        done = [
            Fraction((load + rows[item]) * slow, weight)
            for load, weight, slow in zip(had, weights, slowdown, strict=True)
        ]
        assert given_to[item] == done.index(min(done))
        had[given_to[item]] += rows[item]


def test_one_lane_of_three_times_the_time_gets_a_third_and_none_is_idle() -> None:
    """Half of the samples without images, 1 to 8 in others."""
    plan = planned((1,) * 8, micro_batches=(32, 32), ahead=8)
    counts = {sample: (sample * 5) % 8 + 1 if sample % 2 else 0 for sample in range(64)}
    slow = [64] * 7 + [192]
    found = loads(item_batch(plan, "vision", batch_of(plan), counts, None, slow))
    times = [load * each / 64 for load, each in zip(found, slow, strict=True)]
    assert max(times) <= sum(counts.values()) / (7 + 1 / 3) + 3


def test_items_that_are_not_counted_go_together() -> None:
    plan = planned((1, 1), micro_batches=(3,))
    batch = item_batch(plan, "vision", batch_of(plan), None)
    assert [group.items for _, group in batch.walk()] == [
        (SampleItem(0, -1),),
        (SampleItem(2, -1),),
        (SampleItem(1, -1),),
    ]


def test_a_step_without_items_has_no_groups_and_a_digest() -> None:
    plan = planned((1, 1))
    batch = item_batch(plan, "vision", batch_of(plan), dict.fromkeys(range(4), 0))
    assert batch.pipelines == (((),), ((),))
    assert batch.needs == {}
    assert batch.digest != 0


def test_the_digest_is_of_every_item_and_its_place() -> None:
    plan = planned((1, 1))
    counts = dict.fromkeys(range(4), 2)
    batch = item_batch(plan, "vision", batch_of(plan), counts)
    assert batch.digest == item_batch(plan, "vision", batch_of(plan), counts).digest
    others = [
        item_batch(plan, "vision", batch_of(plan), counts | {3: 1}),
        item_batch(plan, "vision", batch_of(plan), counts, None, (64, 128)),
        ItemBatch(step=4, plan=7, module="vision", pipelines=batch.pipelines),
        ItemBatch(step=3, plan=7, module="audio", pipelines=batch.pipelines),
        ItemBatch(step=3, plan=7, module="vision", pipelines=(batch.pipelines[1], batch.pipelines[0])),
        ItemBatch(step=3, plan=7, module="vision", pipelines=((*batch.pipelines[0], *batch.pipelines[1]),)),
    ]
    assert len({batch.digest, *(other.digest for other in others)}) == 1 + len(others)


def packed_rows(*rows: tuple[tuple[SequencePiece, ...], ...]) -> BatchPlan:
    """Rows of one pipeline, by lane."""
    made = tuple(BatchRow(lanes=lanes) for lanes in rows)
    return BatchPlan(step=3, plan=7, pipelines=(made,), packed=True)


def test_items_of_a_sequence_that_is_cut_over_lanes_are_dealt_once_to_all_of_these() -> None:
    """So are those of a sample that stands twice in a row."""
    cut = [SequencePiece(5, 11, start, stop) for start, stop in ((0, 2), (2, 3), (3, 6))]
    whole, twice = SequencePiece.whole(6, 4), SequencePiece.whole(8, 3)
    batch = packed_rows(((cut[2],), (whole,), (cut[0], cut[1])), ((twice,), (), (twice,)))
    made = item_batch(planned((1,)), "vision", batch, {5: 2, 6: 1, 8: 1})
    assert [(group.items[0], group.lanes, group.micro_batch) for _, group in made.walk()] == [
        (SampleItem(5, 0), (0, 2), 0),
        (SampleItem(5, 1), (0, 2), 0),
        (SampleItem(6, 0), (1,), 0),
        (SampleItem(8, 0), (0, 2), 1),
    ]
    names = [name for name, _ in made.walk()]
    assert made.needs == {
        (0, 0, 0): (names[0], names[1]),
        (0, 2, 0): (names[0], names[1]),
        (0, 1, 0): (names[2],),
        (0, 0, 1): (names[3],),
        (0, 2, 1): (names[3],),
    }
    other = packed_rows(((cut[2],), (whole,), (cut[0], cut[1])), ((), (twice,), (twice,)))
    assert item_batch(planned((1,)), "vision", other, {5: 2, 6: 1, 8: 1}).digest != made.digest


def test_a_sample_that_is_cut_over_rows_is_refused() -> None:
    batch = packed_rows(((SequencePiece(0, 8, 0, 2),),), ((SequencePiece(0, 8, 2, 4),),))
    with pytest.raises(Invalid, match="step 3: sample 0 is cut over rows, and its items are of one row"):
        item_batch(planned((1,)), "vision", batch, {0: 1})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"module": "audio"}, "plan 7: it has no module 'audio' that takes items"),
        ({"module": "language"}, "plan 7: it has no module 'language' that takes items"),
        ({"counts": {0: 1}}, "sample 1: its number of items must be known, and at least 0, not None"),
        ({"counts": dict.fromkeys(range(4), -1)}, "sample 0: .* at least 0, not -1"),
        ({"rows": {SampleItem(0, 0): 3}}, "item 0 of sample 1: its rows must be at least 1, not None"),
        ({"rows": {SampleItem(0, 0): 0}}, "item 0 of sample 0: its rows must be at least 1, not 0"),
        ({"slowdown": (64,)}, r"module vision: 2 lanes need as many slowdowns of at least 1, not \(64,\)"),
        ({"slowdown": (64, 0)}, "2 lanes need as many slowdowns of at least 1"),
    ],
)
def test_bad_input_is_refused_by_name(call: dict[str, Any], message: str) -> None:
    plan = planned((1, 1))
    arguments = {"module": "vision", "counts": dict.fromkeys(range(4), 1)} | call
    with pytest.raises(Invalid, match=message):
        item_batch(plan, batch=batch_of(plan), **arguments)
