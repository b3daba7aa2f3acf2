"""What is left of layouts after a fault."""

from __future__ import annotations

from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.box import Box, subtract
from hypothesis import given
from hypothesis import strategies as st

from tests.migration.plans import SPEC, plans


@given(plan=plans(1), data=st.data())
def test_what_is_left_is_what_the_living_hold(plan, data) -> None:  # type: ignore[no-untyped-def]
    whole = Layouts(SPEC, plan)
    gone = data.draw(st.sets(st.sampled_from(plan.members), max_size=len(plan.members) - 1))
    stale = data.draw(st.sets(st.sampled_from(plan.members)))
    left = SurvivingLayouts(whole, gone=gone, stale=stale)
    lost = dict(left.lost())
    for item in whole.items:
        held: list[Box] = []
        for device in plan.members:
            boxes = left.boxes(item, device)
            assert set(boxes) == set(left.layout(item).of(device))
            assert left.held(device).get(item, ()) == boxes
            if device in gone:
                assert not boxes
            elif device in stale and plan.state.zero and item.role == "value" and item.name in whole.trained:
                assert boxes == whole.boxes(Item(item.name, "state"), device)
            elif device in stale and plan.state.zero and item.role == "buffer":
                assert boxes == tuple(whole.parameter(item.name).of(device)), (
                    "what others send may be half there"
                )
            else:
                assert boxes == whole.boxes(item, device)
            held += boxes
        expected = subtract(Box.whole(whole.layout(item).shape), held)
        assert sum(box.size for box in lost.get(item, ())) == sum(box.size for box in expected)
