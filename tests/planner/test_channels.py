"""A device has no more communicators than it may, and all devices have the same idea of them."""

from __future__ import annotations

import pytest
from elasticd_planner.layout import channels as module
from elasticd_planner.layout.channels import Channel, channels, own_sets
from elasticd_planner.layout.gradient_buckets import buckets, passed_on
from elasticd_planner.layout.gradient_reduction import reductions
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.model import item_size

from tests import sizes
from tests.planner.drawn_plans import SPEC, drawn_plan
from tests.planner.launch_order import Launch, deadlock
from tests.planner.test_launches import logs_of, plan_of_lanes


@pytest.mark.parametrize("seed", sizes.beside(range(20), range(1000)))
def test_no_device_of_a_drawn_plan_has_more_than_it_may(seed: int) -> None:
    layouts = Layouts(SPEC, drawn_plan(seed))
    by_device = {device: channels(layouts, device) for device in layouts.plan.members}
    for device, own in by_device.items():
        assert len(own) <= module.MOST
        assert all(device in channel.members for channel in own)
        for channel in own:
            assert all(channel in by_device[member] for member in channel.members)


def test_the_sets_with_most_bytes_keep_their_communicators() -> None:
    layouts = Layouts(SPEC, drawn_plan(52))
    sets = [each for each in reductions(layouts) if len(each.devices) > 1]
    few = own_sets(layouts, 8)
    assert 0 < len(few) < len(sets)
    size = {
        each.devices: sum(
            piece.box.size * item_size(layouts.parameter(piece.name).dtype) for piece in each.pieces
        )
        for each in sets
    }

    def full_of_larger(device: str, least: int) -> bool:
        others = sum(channel.use not in ("reduce", "state") for channel in channels(layouts, device))
        larger = sum(device in devices and size[devices] >= least for devices in few)
        return others + larger >= 8 - 1

    for devices in size.keys() - few:
        assert any(full_of_larger(device, size[devices]) for device in devices)
    assert few < own_sets(layouts, 1000) == {each.devices for each in sets}


@pytest.mark.parametrize("most", [1, 6])
@pytest.mark.parametrize("seed", sizes.beside(range(4), range(100)))
def test_no_plan_deadlocks_where_sets_have_no_communicator(
    seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", most)
    logs = logs_of(seed)
    assert deadlock(logs) is None
    layouts = Layouts(SPEC, drawn_plan(seed))
    own = own_sets(layouts)
    for device, log in logs.items():
        launched = {entry.communicator for entry in log if isinstance(entry, Launch)}
        assert launched <= set(map(str, channels(layouts, device)))
        assert {name for name in launched if name.startswith("reduce")} <= {
            str(Channel("reduce", devices)) for devices in own
        }


def test_rounds_have_every_bucket_of_a_set_without_a_communicator_once() -> None:
    layouts = Layouts(SPEC, drawn_plan(52))
    listed, own = buckets(layouts, reductions(layouts)), own_sets(layouts, 8)
    together = [bucket for each in passed_on(layouts, listed, own) for bucket in each]
    assert sorted(map(repr, together)) == sorted(repr(b) for b in listed if b.devices not in own)
    assert together


@pytest.mark.parametrize("most", [5, 24])
def test_lanes_that_may_share_sequences_have_one_communicator_more_and_room_for_it(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", most)
    layouts = Layouts(SPEC, plan_of_lanes((2, 3, 1)))
    for device in layouts.plan.members:
        whole, cut = (channels(layouts, device, cuts=cuts) for cuts in (False, True))
        (more,) = {*cut} - {*whole}
        assert len(cut) == len(whole) + 1
        assert (more.use, device in more.members) == ("context", True)
        stage = layouts.plan.places[device].stage
        assert more.members == layouts.plan.pipelines[0].stages[stage].devices
        fixed = sum(channel.use not in ("reduce", "state") for channel in cut)
        assert len(cut) <= max(most, fixed + 1)
