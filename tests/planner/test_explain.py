"""Explanations: HSPMD's operators as its paper has them, sums in two steps, bytes and seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from elasticd_planner.layout.annotations import Annotation
from elasticd_planner.layout.explain import explain
from elasticd_planner.layout.link_traffic import Flow, busiest_seconds, bytes_by_level, level_of, levels_of
from elasticd_planner.layout.resolve import Cell, Communication, Uncovered, resolve
from elasticd_planner.readable import readable, readable_seconds
from elasticd_planner.spec.box import Box, TensorLayout, lacking
from elasticd_planner.spec.cluster import Cluster, Device, Level, Link, Node
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import played_steps
from tests.planner.drawn_annotations import drawn_annotation
from tests.planner.hspmd_operators import BEYOND, PUBLISHED, Case

SEEDS = st.integers(0, 2**32 - 1)


# -- operators -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.name)
def test_an_operator_is_the_one_that_the_paper_has(case: Case) -> None:
    source, target = case.layouts()
    assert explain(source, target).operators == case.operators
    played_steps.check_in_two(source, target, 1)


@pytest.mark.parametrize("case", BEYOND, ids=lambda case: case.name)
def test_what_hspmd_refuses_is_resolved(case: Case) -> None:
    source, target = case.layouts()
    played_steps.check_in_two(source, target, 2)
    played_steps.check_adjoint(source, target, 2, add=False, in_two=True)


@given(SEEDS)
def test_sums_in_two_steps_are_exact_and_send_no_more(seed: int) -> None:
    source, target = played_steps.drawn_pair(random.Random(seed), whole=True)
    played_steps.check_in_two(source, target, seed)
    played_steps.check_adjoint(source, target, seed, add=seed % 2 == 0, in_two=True)
    assert elements(played_steps.hops(source, target)) <= elements([resolve(source, target)])


@given(SEEDS)
def test_annotations_become_one_another(seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.choice(((24,), (16, 17)))
    devices = tuple(f"n{node}/{index}" for node in range(3) for index in range(4))
    source = drawn_annotation(draw, shape, devices=devices).layout(shape)
    target = drawn_annotation(draw, shape, devices=devices, terms=draw.random() < 0.3).layout(shape)
    played_steps.check_in_two(source, target, seed)
    played_steps.check_adjoint(source, target, seed, add=seed % 2 == 0, in_two=True)


def elements(hops: Sequence[Sequence[Communication]]) -> int:
    """Elements that are sent at least, whatever the algorithm of a collective."""
    total = 0
    for step in (step for steps in hops for step in steps):
        for cell in step.cells:
            sources, needers = {*cell.sources}, {*cell.needers}
            if step.operation == "all_reduce":
                total += (len(sources) - 1 + len(needers) - 1) * cell.box.size
            elif step.operation == "reduce_scatter":  # all members hold a term, who needs the sum does, too
                total += (len(sources) - 1) * cell.box.size
            elif step.operation == "sum":
                total += len(sources - needers) * cell.box.size
            elif step.operation not in ("keep", "zero"):
                total += len(needers - sources) * cell.box.size
    return total


# -- words, bytes, seconds -----------------------------------------------------------------------------------

CLUSTER = Cluster(
    nodes=tuple(
        Node(
            name=f"n{node}",
            devices=tuple(Device(name=f"n{node}/{i}", memory=1) for i in range(4)),
            island=2 * (node == 2),
        )
        for node in range(3)
    ),
    inside=Link(bandwidth=100e9, latency=1e-6),
    between=Link(bandwidth=10e9, latency=1e-5),
    within=Link(bandwidth=400e9, latency=1e-6),
)
W = Annotation(
    groups=[("n0/0", "n0/1", "n0/2", "n0/3"), ("n1/0", "n1/1"), ("n1/2",)], states=[{0: 4}, {0: 2}, {}]
)


def test_a_line_says_operator_slices_bytes_groups_and_hspmds_name() -> None:
    found = explain(W.replace(across="sum").layout((4096, 1024)), W.layout((4096, 1024)))
    assert str(found) == (
        "all-reduce  4 slices of [1024, 1024], 4 MiB each, over {n0/0 n1/0 n1/2} {n0/1 n1/0 n1/2} "
        "{n0/2 n1/1 n1/2} {n0/3 n1/1 n1/2}   (SplitAR)"
    )
    assert found.seconds is None


def test_bytes_of_rings_are_counted_by_level_and_seconds_are_those_of_the_busiest_device() -> None:
    source = Annotation(groups=[("n0/0", "n0/1", "n1/0")], states=[{"sum": 3}]).layout((3000,))
    target = Annotation(groups=[("n0/0", "n0/1", "n1/0")], states=[{"same": 3}]).layout((3000,))
    (line,) = explain(source, target, CLUSTER).lines
    assert line.bytes == {"inside nodes": 2 * 2000 * 4, "between nodes": 2 * 2 * 2000 * 4}
    between = CLUSTER.between
    assert line.seconds == pytest.approx(4 * between.latency + 2 * 2000 * 4 / between.bandwidth)
    assert "31.2 KiB between nodes" in str(line)
    assert "inside nodes" in str(line)


def test_bytes_of_messages_are_those_that_go() -> None:
    source = Annotation(groups=[("n0/0", "n0/1")], states=[{0: 2}]).layout((3000,))
    target = Annotation(groups=[("n1/0", "n0/1")], states=[{0: 2}]).layout((3000,))
    found = explain(source, target, CLUSTER)
    assert [str(line) for line in found.lines] == [
        "keep  1 slice of [1500], 5.9 KiB, over {n0/1}   (Identity)",
        "send  1 slice of [1500], 5.9 KiB, over {n0/0 > n1/0}   (SR)   5.9 KiB between nodes, 1.06e-05 s",
    ]
    assert found.bytes == {"between nodes": 6000}
    assert found.seconds == pytest.approx(CLUSTER.between.seconds(6000))
    assert found.operators == ("SR",)


def test_what_a_device_sends_goes_one_after_the_other_and_beside_what_it_receives() -> None:
    source = Annotation(groups=[("n0/0", "n1/0")], states=[{0: 2}]).layout((3000,))
    target = Annotation(groups=[("n0/1", "n0/2", "n2/0", "n0/0")], states=[{0: 4}]).layout((3000,))
    found = explain(source, target, CLUSTER)
    # n0/0 sends two quarters inside its node, and gets one from n1/0, which sends another to n2/0.
    assert found.seconds == pytest.approx(2 * CLUSTER.between.seconds(750 * 4))


@given(SEEDS)
def test_bytes_over_links_are_at_least_those_lacking(seed: int) -> None:
    """Of a value: a gather around a ring sends each slice once to each device that lacks it."""
    draw = random.Random(seed)
    devices = tuple(f"n{node}/{index}" for node in range(3) for index in range(4))
    source = drawn_annotation(draw, (24,), devices=devices, terms=False).layout((24,))
    target = drawn_annotation(draw, (24,), devices=devices, terms=False).layout((24,))
    lacks = sum(box.size for boxes in lacking(source, target).values() for box in boxes)
    assert sum(explain(source, target).bytes.values()) == lacks * 4


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        ("n0/0", "n1/0", "between nodes"),
        ("n0/0", "n0/1", "inside nodes"),
        ("n2/0", "n2/1", "within islands"),
        ("n2/1", "n2/2", "inside nodes"),
    ],
)
def test_the_level_of_a_link_is_that_of_the_cluster(one: str, other: str, level: str) -> None:
    assert level_of(one, other, CLUSTER) == level


def test_equal_layouts_need_nothing_but_to_be_kept() -> None:
    found = explain(W.layout((8, 3)), W.layout((8, 3)))
    assert found.operators == ()
    assert found.bytes == {}
    assert {line.operation for line in found.lines} == {"keep"}


def test_a_target_that_nobody_holds_is_refused_by_name() -> None:
    part = Annotation(groups=[[*"ab"]], states=[{0: 2}]).layout((8,), "blocks.0.q.weight")
    gone = TensorLayout(name=part.name, shape=part.shape, dtype=part.dtype, holdings=part.holdings[:1])
    with pytest.raises(Uncovered, match=r"blocks.0.q.weight: no device holds \(4,\) to \(8,\)"):
        explain(gone, part)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (12, "12 bytes"),
        (2048, "2 KiB"),
        (1536, "1.5 KiB"),
        (4 << 20, "4 MiB"),
        (5 << 30, "5 GiB"),
        (1 << 41, "2 TiB"),
        (1 << 51, "2048 TiB"),
    ],
)
def test_bytes_are_readable(size: int, said: str) -> None:
    assert readable(size) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0.000 s"),
        (1.25, "1.250 s"),
        (0.015, "0.015 s"),
        (0.0042, "4.2 ms"),
        (4.6e-5, "46 µs"),
        (3e-8, "0.03 µs"),
    ],
)
def test_times_are_readable(seconds: float, said: str) -> None:
    assert readable_seconds(seconds) == said


def test_further_levels_of_links_have_their_own_bytes_and_seconds() -> None:
    """Nodes 0 and 1 are a rack, and racks 0 and 1 a pod; nodes 2 and 4 are alone in theirs."""
    levels = (
        Level(name="rack", link=Link(bandwidth=40e9, latency=2e-6), groups=(("n0", "n1"), ("n2",), ("n3",))),
        Level(name="pod", link=Link(bandwidth=20e9, latency=3e-6), groups=(("n0", "n1", "n2"), ("n3",))),
    )
    nodes = tuple(
        Node(name=f"n{node}", devices=tuple(Device(name=f"n{node}/{i}", memory=1) for i in range(2)))
        for node in range(5)
    )
    cluster = Cluster(nodes=nodes, between=Link(bandwidth=1e9, latency=1e-4), levels=levels)
    pairs = {
        ("n0/0", "n0/1"): "inside nodes",
        ("n0/0", "n1/0"): "inside racks",
        ("n1/1", "n2/0"): "inside pods",
        ("n0/0", "n3/0"): "between pods",
        ("n4/0", "n2/0"): "between pods",
    }
    for pair, level in pairs.items():
        assert level_of(*pair, cluster) == level_of(*reversed(pair), cluster) == level
        source = Annotation(groups=[pair[:1]], states=[{}]).layout((1000,))
        target = Annotation(groups=[pair[1:]], states=[{}]).layout((1000,))
        found = explain(source, target, cluster)
        assert found.bytes == {level: 4000}
        assert found.seconds == pytest.approx(cluster.reach(pair).seconds(4000))
    assert levels_of(cluster) == (
        "between pods",
        "inside pods",
        "inside racks",
        "inside nodes",
        "within islands",
    )
    assert levels_of(CLUSTER) == ("between nodes", "inside nodes", "within islands")


def test_sums_in_two_levels_put_less_on_the_links_between_nodes() -> None:
    """2 nodes x 4: a ring puts 2 x 7/8 of a bucket on each node's link, two levels 2 x 1/2."""
    inside, between = Link(bandwidth=1e11, latency=1e-5), Link(bandwidth=1e9, latency=1e-4)
    nodes = tuple(
        Node(name=name, devices=tuple(Device(name=f"{name}/{i}", memory=1) for i in range(4))) for name in "ab"
    )
    cluster = Cluster(nodes=nodes, inside=inside, between=between)
    size = 8_000_000

    def flow(devices: Sequence[str], *, two_level: bool) -> Flow:
        cell = Cell(box=Box.whole((size // 4,)), sources=tuple(devices), needers=tuple(devices))
        step = Communication(operation="all_reduce", devices=tuple(devices), cells=(cell,))
        return Flow(step, 4, two_level=two_level)

    every = [device.name for device in cluster.devices]
    ring, levels = flow(every, two_level=False), flow(every, two_level=True)
    assert bytes_by_level([ring]) == {"between nodes": 2 * 1.75 * size, "inside nodes": 6 * 1.75 * size}
    # Inside: each of the eight gives three others a quarter, twice.
    assert bytes_by_level([levels]) == {"between nodes": 2 * 1.0 * size, "inside nodes": 8 * 3 * 2 * size / 4}
    near, far = 1e-5 + 0.75 * size / 1e11, 1e-4 + 0.5 * size / 1e9
    assert busiest_seconds([levels], cluster) == pytest.approx(2 * near + 2 * far)
    assert busiest_seconds([levels], cluster) < busiest_seconds([ring], cluster)
    for uneven in (every[:4], every[:5], [every[0], every[4]]):
        one, other = flow(uneven, two_level=False), flow(uneven, two_level=True)
        assert bytes_by_level([one], cluster) == bytes_by_level([other], cluster)
        assert busiest_seconds([one], cluster) == busiest_seconds([other], cluster)
