"""Where the shares of a plan's members lie when others stand in for them: everything, exactly once."""

from __future__ import annotations

import pytest
from elasticd_migration.checkpoint_writers import writers
from elasticd_migration.reshard import bytes_lacking, reshard
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.snapshot_layouts import SnapshotLayouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.box import Box, subtract
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.migration.plans import DEVICES, SPEC, alone, plans, random_plan
from tests.sizes import examples

SIZES = {item: 12 if item.role == "state" else 4 for item in Layouts(SPEC, alone()).items}


def dealt(layouts: Layouts) -> dict[str, dict[Item, tuple[Box, ...]]]:
    found: dict[str, dict[Item, tuple[Box, ...]]] = {member: {} for member in layouts.plan.members}
    for role in ("value", "state", "buffer"):
        items = {item.name: item for item in layouts.items if item.role == role}
        for member, boxes in writers([layouts.layout(i) for i in items.values()], layouts.plan.members).items():
            found[member] |= {items[name]: mine for name, mine in boxes.items()}
    return found


@settings(max_examples=examples(80))
@given(plan=plans(1), data=st.data())
def test_everything_lies_somewhere_exactly_once(plan, data) -> None:  # type: ignore[no-untyped-def]
    whole = Layouts(SPEC, plan)
    stands = {member: data.draw(st.sampled_from(DEVICES)) for member in plan.members}
    layouts = SnapshotLayouts(whole, shares=dealt(whole), stands=stands)
    families: dict[object, object] = {}
    for item in whole.items:
        layout = layouts.layout(item)
        held = [holding.box for holding in layout.holdings]
        assert sum(box.size for box in held) == Box.whole(layout.shape).size, "exactly once"
        assert not list(subtract(Box.whole(layout.shape), held)), "all of it"
        assert {holding.device for holding in layout.holdings} <= set(stands.values())
        assert families.setdefault(layouts.family(item), layout.holdings) == layout.holdings
        for device in DEVICES:
            assert set(layouts.boxes(item, device)) == set(layout.of(device))
            assert layouts.held(device).get(item, ()) == layouts.boxes(item, device)


@settings(max_examples=examples(60))
@given(plan=plans(1), seed=st.integers(0, 10_000), data=st.data())
def test_any_plan_can_be_filled_from_it(plan, seed, data) -> None:  # type: ignore[no-untyped-def]
    """Also where the stand-ins' workers are of other incarnations than the old plan's: they read what they
    have."""
    bound = plan.replace(binding=dict.fromkeys(plan.members, "old"))
    after = random_plan(seed, 2, DEVICES)
    after = after.replace(binding=dict.fromkeys(after.members, "new"))
    stands = {member: data.draw(st.sampled_from(after.members)) for member in plan.members}
    old = SnapshotLayouts(Layouts(SPEC, bound), shares=dealt(Layouts(SPEC, bound)), stands=stands)
    new = Layouts(SPEC, after)
    moved = sum(t.box.size * sum(SIZES[item] for item in t.items) for t in reshard(old, new, SIZES))
    assert moved == sum(bytes_lacking(old, new, SIZES).values())


@settings(max_examples=examples(60))
@given(plan=plans(1), seed=st.integers(0, 10_000), data=st.data())
def test_snapshots_of_lost_members_alone_complete_the_copies_that_live(plan, seed, data) -> None:  # type: ignore[no-untyped-def]
    """Each lost element is read once, and nothing that a copy has. What a stale copy lacks was its own, or that
    of a member that keeps it for others: their snapshots have it."""
    whole = Layouts(SPEC, plan)
    gone = data.draw(st.sets(st.sampled_from(plan.members), max_size=len(plan.members)))
    stale = data.draw(st.sets(st.sampled_from(plan.members))) - gone
    left = SurvivingLayouts(whole, gone=gone, stale=stale)
    lost = dict(left.lost())
    assert bool(lost) == bool(left.last_holders())
    living = [device for device in DEVICES if device not in gone] or ["n9/0"]
    stands = {member: data.draw(st.sampled_from(living)) for member in sorted(left.last_holders())}
    layouts = SnapshotLayouts(whole, shares=dealt(whole), stands=stands, left=left)
    for item in whole.items:
        layout, before = layouts.layout(item), left.layout(item)
        boxes = [holding.box for holding in layout.holdings]
        assert layout.holdings[: len(before.holdings)] == before.holdings
        assert not list(subtract(Box.whole(layout.shape), boxes)), "all of it"
        read = boxes[len(before.holdings) :]
        assert sum(box.size for box in read) == sum(box.size for box in lost.get(item, ())), "no more than that"
        for device in DEVICES:
            assert set(layouts.boxes(item, device)) == set(layout.of(device))
    after = Layouts(SPEC, random_plan(seed, 2, DEVICES))
    moved = sum(t.box.size * sum(SIZES[item] for item in t.items) for t in reshard(layouts, after, SIZES))
    assert moved == sum(bytes_lacking(layouts, after, SIZES).values())


def test_a_member_without_a_stand_in_is_named() -> None:
    whole = Layouts(SPEC, alone())
    with pytest.raises(Invalid, match="nobody stands in for n0/0"):
        SnapshotLayouts(whole, shares=dealt(whole), stands={})
