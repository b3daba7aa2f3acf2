"""With two replicas the loss of a node loses nothing: what is left becomes any new layout, bit by bit."""

from __future__ import annotations

import pytest
import torch
from elasticd_migration.migrate import Moved, migrate
from elasticd_migration.reshard import Lost, bytes_lacking, reshard
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.migration.plans import DEVICES, LAYERS, SPEC, plan, plans, random_plan
from tests.migration.ranks import assert_same_bits, local, members, together, trained
from tests.sizes import examples

WHOLE = trained()
SIZES = WHOLE.state().schema().sizes


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


@settings(max_examples=examples(60))
@given(plans(1, least=2), st.integers(0, 10_000), st.sampled_from(["n0", "n1", "n2"]))
def test_any_node_may_be_lost(before: Plan, seed: int, gone: str) -> None:
    assume(len(before.nodes) > 1)
    after = random_plan(seed, 2, [device for device in DEVICES if node_of(device) != gone])
    old, new = Layouts(SPEC, before), Layouts(SPEC, after)
    lost = {device for device in before.members if node_of(device) == gone}
    survivors = [device for device in members(before, after) if device not in lost]
    ends, left = MemoryTransport.connect(survivors), SurvivingLayouts(Layouts(SPEC, before), gone=lost)

    def recover(end: MemoryTransport) -> Moved:
        return migrate(left, new, local(WHOLE, old, end.members[end.rank]), end)

    results = together(ends, recover)
    lacks = bytes_lacking(left, new, SIZES)
    for device, result in zip(survivors, results, strict=True):
        assert isinstance(result, Moved), results
        assert_same_bits(result.state, local(WHOLE, new, device))
        assert result.bytes_received == lacks.get(device, 0)


def test_one_replica_of_one_pipeline_does_not_outlive_its_node() -> None:
    """What is lost is told also where nobody is left who could say what there was."""
    shape = [(1, [("n0/0", 1)]), (LAYERS - 1, [("n1/0", 1)])]
    before = plan(1, shape, zero=1, replicas=1)
    old = SurvivingLayouts(Layouts(SPEC, before), gone={"n0/0"})
    new = Layouts(SPEC, plan(2, [(LAYERS, [("n1/0", 1)])], zero=1, replicas=1))
    left = local(WHOLE, Layouts(SPEC, before), "n1/0").schema().sizes
    assert Item("blocks.0.q.weight", "state") not in left
    with pytest.raises(Lost) as caught:
        reshard(old, new, {**SIZES, **left})
    assert Item("blocks.0.q.weight", "state") in caught.value.boxes
    states = {item: size for item, size in SIZES.items() if item in left or item.role != "state"}
    with pytest.raises(Lost, match=r"no live device holds .*state of blocks.0.norm.weight \[0:4\]"):
        reshard(old, new, states)
    before_the_first_step = {item: size for item, size in SIZES.items() if item.role != "state"}
    replicated = SurvivingLayouts(Layouts(SPEC, plan(1, shape, zero=1, replicas=2)), gone={"n0/0"})
    transfers = reshard(replicated, new, before_the_first_step)
    assert not transfers, "n1/0 carries it all"
