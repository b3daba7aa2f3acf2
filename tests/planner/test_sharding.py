"""State is kept by r devices on r nodes, evenly, in boxes that lie where the value lies, and stays put."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.layout.optimizer_sharding import divided, joined, with_carriers
from elasticd_planner.spec.box import Box, TensorLayout
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.simulator.scenarios.model_shapes import PRESETS, model_spec
from tests.migration.plans import LAYERS, SPEC, plans
from tests.planner.models import plan
from tests.sizes import beside, examples


def masks(layout: TensorLayout) -> dict[str, np.ndarray]:
    """How often each device holds each element."""
    held: dict[str, np.ndarray] = {}
    for holding in layout.holdings:
        mask = held.setdefault(holding.device, np.zeros(layout.shape, dtype=np.int64))
        mask[holding.box.slices(Box.whole(layout.shape))] += 1
    return held


@settings(max_examples=examples(60))
@given(plans(1))
def test_every_element_is_kept_by_r_devices_on_r_nodes_where_there_are_so_many(made: Plan) -> None:
    layouts = Layouts(SPEC, made)
    nodes = made.nodes
    for name in layouts.trained:
        kept = masks(layouts.state(name))
        if not made.state.zero:
            assert layouts.state(name) == layouts.parameter(name)
            continue
        assert all((mask <= 1).all() for mask in kept.values()), "boxes of one device are disjoint"
        replicas = made.state.replicas or 0
        assert (sum(kept.values()) == min(replicas, len(made.members))).all()
        by_node: dict[str, np.ndarray] = {}
        for device, mask in kept.items():
            by_node[node_of(device)] = by_node.get(node_of(device), False) | mask.astype(bool)
        assert (sum(mask.astype(int) for mask in by_node.values()) == min(replicas, len(nodes))).all()


@settings(max_examples=examples(60))
@given(plans(1))
def test_a_device_has_the_value_of_all_whose_state_it_keeps_and_nothing_else_beyond_its_own(made: Plan) -> None:
    layouts = Layouts(SPEC, made)
    held = {device: layouts.held(device) for device in made.members}
    for item in layouts.items:
        layout = layouts.layout(item)
        for device in made.members:
            assert held[device].get(item, ()) == layout.of(device) == layouts.boxes(item, device)
    for name in layouts.trained:
        computing = masks(layouts.parameter(name))
        state, value = masks(layouts.state(name)), masks(layouts.value(name))
        for device in made.members:
            boxes = layouts.boxes(Item(name, "value"), device)
            for part in layouts.boxes(Item(name, "state"), device):
                assert any(box.contains(part) for box in boxes)
            needed = [m[device].astype(bool) for m in (computing, state) if device in m]
            if needed:
                assert (value[device] == np.logical_or.reduce(needed)).all()
            else:
                assert device not in value


@settings(max_examples=examples(40))
@given(plans(1, least=2))
def test_with_two_replicas_no_node_takes_state_or_values_along(made: Plan) -> None:
    layouts = Layouts(SPEC, made)
    nodes = made.nodes
    if len(nodes) < 2:
        return
    for item in layouts.items:
        held = masks(layouts.layout(item))
        for gone in nodes:
            left = [mask for device, mask in held.items() if node_of(device) != gone]
            assert np.logical_or.reduce(left).all(), (item, gone)


def two(first: int, second: int, **rest: object) -> Plan:
    return plan((first, [(LAYERS, ["a/0"], [1])]), (second, [(LAYERS, ["b/0"], [1])]), **rest)


def rows(made: Plan, name: str) -> dict[str, int]:
    layout = Layouts(SPEC, made).state(name)
    return {holding.device: holding.box.shape[0] for holding in layout.holdings}


def test_unequal_devices_keep_unequal_parts() -> None:
    zero = StatePolicy(zero=1, replicas=1)
    assert rows(two(6, 2, state=zero), "embed.tokens.weight") == {"a/0": 80 * 4 // 5, "b/0": 80 // 5}
    assert rows(two(4, 4, state=zero), "embed.tokens.weight") == {"a/0": 40, "b/0": 40}


def test_one_micro_batch_more_moves_no_state() -> None:
    zero = StatePolicy(zero=1, replicas=1)
    before, after = (Layouts(SPEC, two(*counts, state=zero)) for counts in ((16, 16), (17, 15)))
    assert all(before.state(name) == after.state(name) for name in before.trained)


def test_one_pipeline_has_its_replicas_where_the_box_is_not_computed() -> None:
    one = plan((4, [(1, ["a/0"], [1]), (2, ["b/0"], [1])]), state=StatePolicy(zero=1, replicas=2))
    layouts = Layouts(SPEC, one)
    assert {h.device for h in layouts.parameter("blocks.0.q.weight").holdings} == {"a/0"}
    assert {h.device for h in layouts.state("blocks.0.q.weight").holdings} == {"a/0", "b/0"}
    assert layouts.value("blocks.0.q.weight") == layouts.state("blocks.0.q.weight")
    assert layouts.boxes(Item("blocks.0.q.weight", "value"), "b/0") == (Box.whole((32, 48)),)


def test_carriers_come_from_idle_devices_of_other_nodes_only_where_they_are_needed() -> None:
    zero = StatePolicy(zero=1, replicas=2)
    alone = plan((2, [(LAYERS, ["a/0"], [1])]), state=zero, idle=("a/1", "b/0", "c/0", "c/1"))
    carried = with_carriers(alone)
    assert (carried.carriers, carried.idle) == (("c/0", "c/1"), ("a/1", "b/0"))
    assert carried.members == ("a/0", "c/0", "c/1")
    assert carried.digest != alone.digest
    assert with_carriers(carried) == carried
    layouts = Layouts(SPEC, carried)
    sizes = Counter(
        {
            d: sum(b.size for n in layouts.trained for b in layouts.boxes(Item(n, "state"), d))
            for d in carried.members
        }
    )
    assert sizes["a/0"] == sizes["c/0"] + sizes["c/1"]
    enough = two(1, 1, state=zero, idle=("c/0",))
    assert with_carriers(enough) is enough
    with pytest.raises(Invalid, match="c/0 carries replicas, which zero 0 does not have"):
        plan((2, [(LAYERS, ["a/0"], [1])]), carriers=("c/0",))
    with pytest.raises(Invalid, match="a/0 is placed twice"):
        plan((2, [(LAYERS, ["a/0"], [1])]), carriers=("a/0",), state=zero)


@given(st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_parts_add_up_and_differ_from_proportion_by_less_than_one(count: int, weights: list[int]) -> None:
    given_out = divided(count, weights)
    assert sum(given_out) == count
    assert all(abs(g - count * w / sum(weights)) < 1 for g, w in zip(given_out, weights, strict=True))


def test_neighbouring_boxes_are_one() -> None:
    quarters = [Box(start=(r, c), stop=(r + 2, c + 3)) for r in (0, 2) for c in (0, 3)]
    assert joined(quarters[::-1]) == [Box.whole((4, 6))]
    assert joined(quarters[:3]) == [Box(start=(0, 0), stop=(2, 6)), Box(start=(2, 0), stop=(4, 3))]


@pytest.mark.parametrize("replicas", beside([2], [1, 2]))
def test_a_thousand_devices_are_dealt_evenly_and_at_once(replicas: int) -> None:
    spec = model_spec("llama-70b", PRESETS["llama-70b"])
    devices = [f"n{i // 8:03d}/{i % 8}" for i in range(1024)]
    groups = [devices[i : i + 8] for i in range(0, 1024, 8)]
    pipelines = [(8, [(20, groups[4 * p + s], [1] * 8) for s in range(4)]) for p in range(32)]
    made = plan(*pipelines, state=StatePolicy(zero=1, replicas=replicas))
    start = time.process_time()
    layouts = Layouts(spec, made)
    loads: Counter[str] = Counter()
    for device in devices:
        for item, boxes in layouts.held(device).items():
            if item.role == "state":
                loads[device] += sum(box.size for box in boxes)
        if device == devices[0]:
            seconds = time.process_time() - start
    assert seconds < 10.0, "0.1 to 0.4 s on one core"
    everything = sum(Box.whole(layouts.state(name).shape).size for name in layouts.trained)
    assert sum(loads.values()) == replicas * everything
    for stage in range(4):
        of_stage = [loads[d] for p in range(32) for d in groups[4 * p + stage]]
        assert max(of_stage) < 1.01 * min(of_stage)
