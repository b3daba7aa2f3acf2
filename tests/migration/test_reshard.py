"""Transfers: exactly what is lacking, from who has it, the nearest and least loaded first."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from elasticd_migration.reshard import (
    Lost,
    Transfer,
    bytes_lacking,
    renewed,
    reshard,
    span,
    whole_bytes,
)
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.migration.plans import DEVICES, LAYERS, SPEC, alone, plan, plans
from tests.sizes import examples

SIZES = {item: {"value": 4, "state": 8, "buffer": 2}[item.role] for item in Layouts(SPEC, alone()).items}


def each(transfers: Sequence[Transfer]) -> list[tuple[Item, Transfer]]:
    return [(item, transfer) for transfer in transfers for item in transfer.items]


def masks(layouts: Layouts, without: frozenset[str] = frozenset()) -> dict[tuple[Item, str], np.ndarray]:
    """For each tensor and device, which elements it holds: the oracle, without box arithmetic."""
    held: dict[tuple[Item, str], np.ndarray] = {}
    for item in layouts.items:
        layout = layouts.layout(item)
        for holding in layout.holdings:
            mask = held.setdefault((item, holding.device), np.zeros(layout.shape, dtype=bool))
            mask[holding.box.slices(Box.whole(layout.shape))] = holding.device not in without
    return held


@settings(max_examples=examples(40))
@given(plans(1), plans(2), st.frozensets(st.sampled_from(DEVICES), max_size=2))
def test_every_device_gets_exactly_what_it_lacks_from_who_has_it(
    before: Plan, after: Plan, gone: frozenset[str]
) -> None:
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    left = SurvivingLayouts(Layouts(SPEC, before), gone=gone)
    had, needed = masks(old, gone), masks(new)
    everything = {item: np.zeros(old.layout(item).shape, dtype=bool) for item in old.items}
    for (item, _), mask in had.items():
        everything[item] |= mask
    lost = {item for item, _ in needed if not everything[item].all()}
    if lost:
        with pytest.raises(Lost) as caught:
            reshard(left, new, SIZES)
        assert set(caught.value.boxes) <= lost
        return
    transfers = reshard(left, new, SIZES)
    assert transfers == reshard(SurvivingLayouts(Layouts(SPEC, before), gone=gone), Layouts(SPEC, after), SIZES)
    received: dict[str, int] = defaultdict(int)
    end = dict(had)
    for item, transfer in each(transfers):
        shape = old.layout(item).shape
        where = transfer.box.slices(Box.whole(shape))
        assert had[item, transfer.source][where].all()
        mask = end.get((item, transfer.destination), np.zeros(shape, dtype=bool)).copy()
        assert not mask[where].any(), "a byte is received that was there already"
        mask[where] = True
        for layouts, device in ((old, transfer.source), (new, transfer.destination)):
            boxes = layouts.boxes(item, device)
            assert any(box.contains(transfer.box) for box in boxes), "in one piece at both ends"
        end[item, transfer.destination] = mask
        received[transfer.destination] += transfer.box.size * SIZES[item]
    assert all(end[key][mask].all() for key, mask in needed.items())
    assert received == bytes_lacking(left, new, SIZES)


@settings(max_examples=examples(30))
@given(plans(1), plans(2))
def test_another_node_sends_only_what_no_neighbour_holds(before: Plan, after: Plan) -> None:
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    for item, transfer in each(reshard(old, new, SIZES)):
        if node_of(transfer.source) == node_of(transfer.destination):
            continue
        near = [
            holding
            for holding in old.layout(item).holdings
            if node_of(holding.device) == node_of(transfer.destination)
        ]
        assert not any(holding.box.overlap(transfer.box) for holding in near)


@settings(max_examples=examples(20))
@given(plans(1))
def test_a_plan_that_changes_no_box_moves_nothing(before: Plan) -> None:
    after = before.replace(number=2, global_batch=2 * before.global_batch, micro_batch=2)
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    assert reshard(old, new, SIZES) == ()
    assert bytes_lacking(old, new, SIZES) == {}


def test_only_the_layers_that_change_hands_move() -> None:
    old = Layouts(SPEC, plan(1, [(1, [("n0/0", 1)]), (2, [("n0/1", 1)])]))
    new = Layouts(SPEC, plan(2, [(2, [("n0/0", 1)]), (1, [("n0/1", 1)])]))
    moved = reshard(old, new, SIZES)
    assert {item for item, _ in each(moved)} == {item for item in old.items if "blocks.1." in item.name}
    assert {(transfer.source, transfer.destination) for transfer in moved} == {("n0/1", "n0/0")}


def test_the_holders_of_other_nodes_share_the_load() -> None:
    replicas = [[(LAYERS, [(device, 1)])] for device in ("n0/0", "n0/1", "n0/2")]
    old = Layouts(SPEC, plan(1, *replicas))
    new = Layouts(SPEC, plan(2, *replicas, [(LAYERS, [("n1/0", 1)])]))
    sizes = {item: 12 if "blocks" in item.name else 0 for item in SIZES}
    given_by: dict[str, int] = defaultdict(int)
    for item, transfer in each(reshard(old, new, sizes)):
        given_by[transfer.source] += transfer.box.size * sizes[item]
    largest = max(Box.whole(old.layout(item).shape).size * sizes[item] for item in sizes)
    assert set(given_by) == {"n0/0", "n0/1", "n0/2"}
    assert max(given_by.values()) - min(given_by.values()) <= largest


def test_borders_of_holders_that_do_not_send_cut_nothing() -> None:
    near = [(LAYERS, [("n0/0", 1)])]
    far = [(LAYERS, [("n1/0", 1), ("n1/1", 1)])]
    old = Layouts(SPEC, plan(1, near, far))
    new = Layouts(SPEC, plan(2, near, far, [(LAYERS, [("n0/1", 1)])]))
    transfers = reshard(old, new, SIZES)
    assert [item for item, _ in each(transfers)] == list(SIZES)
    assert {transfer.source for transfer in transfers} == {"n0/0"}


def test_where_all_are_gone_the_same_plan_lacks_everything() -> None:
    both = plan(1, [(LAYERS, [("n0/0", 1)])], [(LAYERS, [("n0/1", 1)])])
    new = Layouts(SPEC, both)
    whole = whole_bytes(new, SIZES)
    gone = SurvivingLayouts(Layouts(SPEC, both), gone={"n0/0", "n0/1"})
    assert bytes_lacking(gone, new, SIZES) == {"n0/0": whole, "n0/1": whole}


def test_what_nobody_holds_is_named() -> None:
    before = plan(1, [(1, [("n0/0", 1)]), (2, [("n0/1", 3), ("n0/2", 1)])])
    old = SurvivingLayouts(Layouts(SPEC, before), gone={"n0/2"})
    new = Layouts(SPEC, plan(2, [(LAYERS, [("n0/0", 1)])]))
    with pytest.raises(
        Lost, match=r"no live device holds blocks\.1\.q\.weight \[24:32, 0:48\].*checkpoint"
    ) as error:
        reshard(old, new, SIZES)
    assert error.value.boxes[Item("blocks.2.o.weight", "state")] == (Box(start=(0, 24), stop=(48, 32)),)
    assert not any("blocks.0." in name or "norm" in name for name, _ in error.value.boxes)


def test_a_new_incarnation_of_a_device_owns_nothing() -> None:
    pipelines = [(LAYERS, [("n0/0", 1)])], [(LAYERS, [("n0/1", 1)])]
    before = plan(1, *pipelines, binding={"n0/0": "a", "n0/1": "b"})
    after = plan(2, *pipelines, binding={"n0/0": "a", "n0/1": "c"})
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    assert renewed(before, after) == {"n0/1"}
    assert bytes_lacking(old, new, SIZES) == {"n0/1": whole_bytes(new, SIZES)}
    assert {transfer.source for transfer in reshard(old, new, SIZES)} == {"n0/0"}


def test_layouts_of_other_models_and_unknown_sizes_are_refused() -> None:
    shape = [(LAYERS, [("n0/0", 1)])]
    old = Layouts(SPEC, plan(1, shape))
    new = Layouts(SPEC, plan(2, [(LAYERS, [("n0/1", 1)])]))
    with pytest.raises(ValueError, match="sizes must name every tensor"):
        reshard(old, new, {})
    with pytest.raises(Invalid, match="cannot send to itself"):
        Transfer(name="x", roles=("value",), box=Box(start=(), stop=()), source="n0/0", destination="n0/0")
    assert span(Box(start=(0, 8), stop=(4, 16))) == "[0:4, 8:16]"
