"""What the listing of a switch says is what a move sends, pair by pair, to the byte."""

from __future__ import annotations

from collections import Counter

import pytest
from elasticd_migration.explained_switch import ExplainedSwitch, explain_switch
from elasticd_migration.migrate import Moved, migrate
from elasticd_migration.reshard import Lost
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node
from elasticd_planner.spec.plan import Plan
from hypothesis import given, settings

from tests.migration.plans import DEVICES, SPEC, alone, plan, plans
from tests.migration.ranks import members, together
from tests.migration.test_execute import held
from tests.sizes import examples

CLUSTER = Cluster(
    nodes=tuple(
        Node(name=f"n{node}", devices=tuple(Device(name=f"n{node}/{i}", memory=1) for i in range(3)))
        for node in range(3)
    ),
    inside=Link(bandwidth=1e9, latency=1e-6),
    between=Link(bandwidth=1e8, latency=1e-5),
)
SIZES = held(Layouts(SPEC, alone()), "n0/0").schema().sizes


@settings(max_examples=examples(25))
@given(plans(1), plans(2))
def test_the_listing_is_what_a_move_sends(before: Plan, after: Plan) -> None:
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    listed = explain_switch(old, new, SIZES, CLUSTER)
    ends = MemoryTransport.connect(members(before, after))
    states = {device: held(old, device) for device in ends[0].members}
    results = together(ends, lambda end: migrate(old, new, states[end.members[end.rank]], end))
    sent: Counter[tuple[str, str]] = Counter()
    for end, result in zip(ends, results, strict=True):
        assert isinstance(result, Moved), result
        for source, (size, _) in result.flows.items():
            sent[source, end.members[end.rank]] += size
    assert pairs(listed) == sent
    assert listed.moved == listed.least == sent.total()
    assert sum(listed.communications.bytes().values()) == sent.total()
    assert listed.moved <= listed.whole * len(DEVICES)


def pairs(listed: ExplainedSwitch) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for operation in listed.communications.operations:
        source, to = operation.devices
        found[source, to] += operation.size
    return found


def test_seconds_are_those_of_the_busiest_link() -> None:
    one, two = plan(1, [(3, [("n0/0", 1)])]), plan(2, [(3, [("n1/0", 1)])])
    found = explain_switch(Layouts(SPEC, one), Layouts(SPEC, two), SIZES, CLUSTER)
    assert found.moved == found.whole
    assert found.communications.bytes() == {"between nodes": found.moved}
    link = CLUSTER.between
    assert found.seconds == pytest.approx(link.latency + found.moved / link.bandwidth)
    assert explain_switch(Layouts(SPEC, one), Layouts(SPEC, two), SIZES).seconds is None


def test_a_switch_to_the_same_plan_moves_nothing() -> None:
    same = Layouts(SPEC, plan(1, [(3, [("n0/0", 1)])]))
    found = explain_switch(same, same, SIZES, CLUSTER)
    assert (found.moved, found.communications.operations, found.seconds) == (0, (), 0.0)


def test_what_nobody_holds_is_named() -> None:
    one, two = plan(1, [(3, [("n0/0", 1)])]), plan(2, [(3, [("n1/0", 1)])])
    with pytest.raises(Lost, match=r"no live device holds embed\.tokens\.weight"):
        explain_switch(SurvivingLayouts(Layouts(SPEC, one), gone=("n0/0",)), Layouts(SPEC, two), SIZES)
