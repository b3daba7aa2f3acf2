"""Flows over the border of two layouts: each row that a device lacks comes once, and so does its gradient."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from elasticd_planner.layout.flows import FlowMessage, borders, flow, stage_flows
from elasticd_planner.spec.box import Box, Holding, TensorLayout
from elasticd_planner.spec.cluster import node_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import sizes
from tests.planner.drawn_plans import DEVICES, drawn_plan

WIDTH = 2


def rows_of(groups: Sequence[tuple[Sequence[str], int, int]]) -> TensorLayout:
    """Each device of a group has rows from the first number to the second one."""
    holdings = tuple(
        Holding(device=device, box=Box(start=(start, 0), stop=(stop, WIDTH)))
        for devices, start, stop in groups
        for device in devices
    )
    return TensorLayout(
        name="activation", shape=(max(group[2] for group in groups), WIDTH), dtype="any", holdings=holdings
    )


def drawn(rng: random.Random) -> tuple[TensorLayout, TensorLayout]:
    """Items of TP groups of any widths, and a stage that needs all of them or a range of rows on each device;
    some devices are in both."""
    free, groups = rng.sample(DEVICES, len(DEVICES)), []
    rows = list(accumulate((rng.randint(1, 5) for _ in range(rng.randint(1, 4))), initial=0))
    for start, stop in pairwise(rows):
        groups.append(([free.pop() for _ in range(rng.randint(1, 3))], start, stop))
    needing = rng.sample(DEVICES, rng.randint(1, 4))
    if rng.random() < 0.5:
        return rows_of(groups), rows_of([(needing, 0, rows[-1])])
    cuts = sorted(rng.randint(0, rows[-1]) for _ in needing[1:])
    ranges = pairwise([0, *cuts, rows[-1]])
    return rows_of(groups), rows_of([([device], *span) for device, span in zip(needing, ranges, strict=True)])


def rows(boxes: Iterable[Box]) -> Counter[int]:
    """How often each row is in these boxes, which are as wide as the tensor."""
    listed = list(boxes)
    assert all((box.start[1], box.stop[1]) == (0, WIDTH) for box in listed)
    return Counter(row for box in listed for row in range(box.start[0], box.stop[0]))


def check(source: TensorLayout, target: TensorLayout, sent: Sequence[FlowMessage]) -> None:
    """Each device of the target has each row that it needs once, of one that holds it, near by if any is."""
    for device in {holding.device for holding in target.holdings}:
        needs, has = rows(target.of(device)), rows(source.of(device))
        comes = rows(message.box for message in sent if device in message.destinations)
        assert comes == needs - has
    for message in sent:
        assert rows([message.box]) <= rows(source.of(message.source))
        for device in message.destinations:
            if node_of(device) != node_of(message.source):
                near = [each for each in source.holdings if node_of(each.device) == node_of(device)]
                assert not any(rows([message.box]) <= rows([each.box]) for each in near)


@given(st.randoms(use_true_random=False))
@settings(max_examples=sizes.examples(400), deadline=None)
def test_each_row_that_a_device_lacks_comes_once_and_so_does_its_gradient(rng: random.Random) -> None:
    source, target = drawn(rng)
    forth, back = flow(source, target)
    check(source, target, forth)
    check(target, source, back)


def test_rows_of_one_device_for_unlike_devices_are_messages_of_their_own() -> None:
    source = rows_of([(["a/0"], 0, 4)])
    target = rows_of([(["b/0"], 0, 1), (["b/1"], 1, 4)])
    assert [(message.source, message.destinations) for message in flow(source, target).forth] == [
        ("a/0", ("b/0",)),
        ("a/0", ("b/1",)),
    ]


def test_both_ends_of_the_borders_of_stages_agree() -> None:
    for seed in range(20):
        plan = drawn_plan(seed)
        around = {
            device: borders(plan.pipeline(place), place, device)
            for device, place in plan.places.items()
            if len(plan.pipeline(place).stages) > 1
        }
        assert around or all(len(lane.stages) == 1 for lane in plan.by_lane)
        for device, (before, after) in around.items():
            assert device in around[before.source][1].destinations
            assert device in around[after.source][0].destinations
            assert all(around[to][0].source == device for to in after.destinations)
            assert all(around[to][1].source == device for to in before.destinations)


def test_an_interleaved_pipeline_hands_on_from_its_last_stage_to_its_first() -> None:
    for seed in range(30):
        for lane in drawn_plan(seed).by_lane:
            crossed = [times for _, times in stage_flows(lane)]
            turns = len(lane.stages) * lane.chunks
            assert sum(crossed) == turns - 1
            assert len(crossed) == len(lane.stages) - (lane.chunks == 1)
