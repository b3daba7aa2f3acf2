"""Redistributions lowered to link levels: exact on integers, chosen by price, flat where links are alike."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from elasticd_planner.layout.lowering import BucketStep, Phase, lowered, phases, seconds
from elasticd_planner.layout.resolve import resolve
from elasticd_planner.spec.box import Box, Holding, TensorLayout
from elasticd_planner.spec.cluster import Cluster, Device, Level, Link, Node, node_of
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import played_steps

SEEDS = st.integers(0, 2**32 - 1)

FAST, MIDDLE, SLOW = (
    Link(bandwidth=bandwidth, latency=latency)
    for bandwidth, latency in ((2e11, 1e-6), (1e10, 5e-6), (1e9, 5e-5))
)


def cluster(
    *sizes: int, island: int = 0, racks: int = 0, links: tuple[Link, ...] = (FAST, FAST, MIDDLE, SLOW)
) -> Cluster:
    """Nodes n0, n1, ... of these sizes; `racks`: so many nodes are one."""
    names = [f"n{n}" for n in range(len(sizes))]
    groups = [tuple(names[at : at + racks]) for at in range(0, len(sizes), racks or 1)]
    return Cluster(
        nodes=tuple(
            Node(
                name=f"n{n}",
                devices=tuple(Device(name=f"n{n}/{i}", memory=1) for i in range(size)),
                island=island,
            )
            for n, size in enumerate(sizes)
        ),
        within=links[0] if island else None,
        inside=links[1],
        between=links[3],
        levels=(Level(name="rack", link=links[2], groups=tuple(groups)),) if racks else (),
    )


def tensor(shape: tuple[int, ...], *holdings: tuple[str, str | None]) -> TensorLayout:
    """All of a tensor on each of these devices: (device, term)."""
    whole = Box.whole(shape)
    return TensorLayout(
        name="x",
        shape=shape,
        dtype="int64",
        holdings=tuple(Holding(device=device, box=whole, partial=term) for device, term in holdings),
    )


def drawn_links(draw: random.Random) -> tuple[Link, ...]:
    return tuple(
        Link(bandwidth=10 ** draw.uniform(3, 9), latency=draw.choice((0.0, 10 ** draw.uniform(-6, -3))))
        for _ in range(4)
    )


def drawn_cluster(draw: random.Random, nodes: int) -> Cluster:
    links = drawn_links(draw)
    return cluster(*[4] * nodes, island=draw.choice((0, 2, 3)), racks=draw.choice((0, 2, 3)), links=links)


def check(chain: tuple[Phase, ...], source: TensorLayout, target: TensorLayout, seed: int) -> None:
    """The phases give the integers that the steps of `resolve` give, term by term."""
    values = played_steps.values_of(source, np.random.default_rng(seed))
    state = played_steps.held(source, values)
    for phase in chain:
        state = played_steps.played(phase.steps, state, phase.layout)
    assert chain[-1].layout == target
    found, covered = played_steps.whole(target, state)
    flat, flat_covered = played_steps.whole(
        target, played_steps.played(resolve(source, target), played_steps.held(source, values), target)
    )
    assert found.keys() == flat.keys()
    assert all((found[term] == flat[term]).all() for term in flat)
    assert (covered == flat_covered).all()
    assert (sum(found.values()) == np.where(covered, sum(values.values()), 0)).all()


# -- values --------------------------------------------------------------------------------------------------


@given(SEEDS)
def test_any_lowered_redistribution_has_the_value_of_the_flat_one(seed: int) -> None:
    draw = random.Random(seed)
    source, target = played_steps.drawn_pair(draw)
    check(lowered(source, target, drawn_cluster(draw, 3)), source, target, seed)


def drawn_sum(draw: random.Random) -> tuple[Cluster, TensorLayout, TensorLayout]:
    """Terms, some of them with replicas, on uneven numbers of devices of up to five nodes; the sum on the same
    devices, or on others."""
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(2, 5))]
    here = cluster(*sizes, island=draw.choice((0, 2)), racks=draw.choice((0, 2)), links=drawn_links(draw))
    devices = [device.name for device in here.devices]
    holders = draw.sample(devices, draw.randint(2, len(devices)))
    terms = draw.choice((1, 2, len(holders), len(holders)))
    shape = tuple(draw.randint(1, 13) for _ in range(draw.randint(0, 2)))
    needers = holders if draw.random() < 0.5 else draw.sample(devices, draw.randint(1, len(devices)))
    held = [(device, f"t{at % terms}" if terms > 1 else None) for at, device in enumerate(holders)]
    return here, tensor(shape, *held), tensor(shape, *((device, None) for device in needers))


@given(SEEDS)
def test_sums_and_copies_over_uneven_nodes_have_their_value(seed: int) -> None:
    here, source, target = drawn_sum(random.Random(seed))
    check(lowered(source, target, here), source, target, seed)


def test_enough_of_what_is_drawn_is_lowered() -> None:
    drawn = map(drawn_sum, map(random.Random, range(150)))
    lengths = [len(lowered(source, target, here)) for here, source, target in drawn]
    assert sum(length > 1 for length in lengths) > 30
    assert sum(length > 3 for length in lengths) > 5, "over more than two levels"


def test_a_chain_costs_less_than_the_flat_steps() -> None:
    for seed in range(100):
        here, source, target = drawn_sum(random.Random(seed))
        chain = lowered(source, target, here)
        flat = seconds(resolve(source, target), here)
        spent = sum(seconds(phase.steps, here) for phase in chain)
        assert spent < flat if len(chain) > 1 else spent == flat


# -- which steps ---------------------------------------------------------------------------------------------


def operations(chain: tuple[Phase, ...]) -> list[list[tuple[str, str]]]:
    return [
        [(step.operation, " ".join(step.devices)) for step in phase.steps if step.operation != "keep"]
        for phase in chain
    ]


def test_an_all_reduce_over_nodes_is_scattered_inside_them_reduced_between_them_and_gathered() -> None:
    devices = ["n0/0", "n0/1", "n1/0", "n1/1"]
    source, target = (tensor((8,), *((d, d if term else None) for d in devices)) for term in (True, False))
    inside = ["n0/0 n0/1", "n1/0 n1/1"]
    assert operations(lowered(source, target, cluster(2, 2))) == [
        [("reduce_scatter", pair) for pair in inside],
        [("all_reduce", "n0/0 n1/0"), ("all_reduce", "n0/1 n1/1")],
        [("all_gather", pair) for pair in inside],
    ]


def test_nodes_of_other_sizes_have_other_slices_or_as_few_as_the_smallest() -> None:
    devices = ("n0/0", "n0/1", "n0/2", "n1/0")
    few, many = (
        [tensor((rows,), *((d, d if term else None) for d in devices)) for term in (True, False)]
        for rows in (6, 1 << 26)
    )
    assert operations(lowered(*many, cluster(3, 1))) == [
        [("reduce_scatter", "n0/0 n0/1 n0/2")],
        [("all_reduce", f"n0/{i} n1/0") for i in range(3)],
        [("all_gather", "n0/0 n0/1 n0/2")],
    ]
    # Smaller parts inside the node do not pay for the wait of the lone device, which is in all three.
    assert operations(lowered(*few, cluster(3, 1))) == [
        [("sum", "n0/0 n0/1 n0/2")],
        [("all_reduce", "n0/0 n1/0")],
        [("send", "n0/0 n0/1 n0/2")],
    ]


def test_a_stage_boundary_is_scattered_over_the_slow_link_and_gathered_inside_the_node() -> None:
    big = (1024, 4)
    source = tensor(big, ("n0/0", None), ("n0/1", None))
    target = tensor(big, ("n1/0", None), ("n1/1", None), ("n1/2", None))
    chain = lowered(source, target, cluster(2, 3))
    # Senders take turns.
    assert operations(chain) == [
        [("send", "n0/0 n1/0"), ("send", "n0/0 n1/2"), ("send", "n0/1 n1/1")],
        [("all_gather", "n1/0 n1/1 n1/2")],
    ]
    between = sum(
        cell.box.size
        for step in chain[0].steps
        for cell in step.cells
        if {*map(node_of, cell.sources)} != {*map(node_of, cell.needers)}
    )
    assert between == 1024 * 4, "once over the slow link"


def test_terms_for_another_node_are_summed_before_they_are_sent() -> None:
    source = tensor((64, 64), *((f"n0/{i}", f"t{i}") for i in range(4)))
    target = tensor((64, 64), ("n1/0", None))
    chain = lowered(source, target, cluster(4, 1))
    assert operations(chain)[0] == [("reduce_scatter", "n0/0 n0/1 n0/2 n0/3")]
    assert {name for name, _ in operations(chain)[1]} == {"send"}


def test_three_levels_are_lowered_one_after_another() -> None:
    here = cluster(2, 2, 2, 2, racks=2)
    devices = [device.name for device in here.devices]
    made = phases(devices, 64, here)
    assert [step.operation for step in made] == (
        ["reduce_scatter"] * 8 + ["all_reduce"] * 4 + ["all_gather"] * 8
    )


@pytest.mark.parametrize("link", [FAST, SLOW])
def test_where_all_links_are_alike_steps_stay_what_they_are(link: Link) -> None:
    draw = random.Random(3)
    for _ in range(50):
        source, target = played_steps.drawn_pair(draw)
        here = cluster(4, 4, 4, island=2, racks=2, links=(link,) * 4)
        assert lowered(source, target, here) == (Phase(layout=target, steps=resolve(source, target)),)
        one = msgspec.structs.replace(source, holdings=()), msgspec.structs.replace(target, holdings=())
        assert lowered(*one, here) == (Phase(layout=one[1], steps=()),)


def test_what_is_cheaper_flat_stays_flat() -> None:
    # One ring over 64 devices puts 126 / 64 of the bytes on a node's link, levels 14 / 8: less than what they
    # put on links inside nodes that are four times as quick, and more than on links 40 times as quick.
    for times, flat in ((4, True), (40, False)):
        near, far = Link(bandwidth=times * 1e9, latency=0), Link(bandwidth=1e9, latency=0)
        here = cluster(*[8] * 8, links=(near, near, far, far))
        devices = [device.name for device in here.devices]
        made = phases(devices, 1 << 20, here)
        one = BucketStep("all_reduce", tuple(devices), (((0, 1 << 20),),) * len(devices))
        assert (made == (one,)) is flat


# -- prices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (4, 8), (8, 4), (8, 8)])
@pytest.mark.parametrize("latency", [0.0, 5e-5])
def test_prices_are_those_of_rings_where_nodes_are_even(nodes: int, devices: int, latency: float) -> None:
    """Without latencies the same; with them no more, since here a hop of a flat ring has its own link's, and
    one of several rings waits while others send."""
    near, far = (msgspec.structs.replace(link, latency=latency) for link in (FAST, SLOW))
    here = cluster(*[devices] * nodes, links=(near, near, far, far))
    names = [device.name for device in here.devices]
    elements = nodes * devices * 4096
    source, target = (tensor((elements,), *((d, d if term else None) for d in names)) for term in (True, False))
    chain = lowered(source, target, here)
    assert len(chain) == 3
    count, size = nodes * devices, elements * 4
    by_level = sum(2 * (n - 1) * link.seconds(size / n) for n, link in ((devices, near), (nodes, far)))
    for spent, known in (
        (sum(seconds(phase.steps, here) for phase in chain), by_level),
        (seconds(resolve(source, target), here), 2 * (count - 1) * far.seconds(size / count)),
    ):
        assert spent <= known * (1 + 1e-9)
        assert latency or spent == pytest.approx(known)


# -- a bucket ------------------------------------------------------------------------------------------------


def reduced(made: tuple[BucketStep, ...], parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The steps of a bucket carried out as a rank does: on its own copy, in place."""
    for step in made:
        spans = dict(zip(step.devices, step.ranges, strict=True))
        before = {device: parts[device].copy() for device in step.devices}
        for device in step.devices:
            for giver in step.devices if step.operation == "all_gather" else (device,):
                for start, stop in spans[giver]:
                    values = (
                        before[giver][start:stop]
                        if step.operation == "all_gather"
                        else sum(each[start:stop] for each in before.values())
                    )
                    parts[device][start:stop] = values
    return parts


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 70), SEEDS)
def test_each_rank_has_the_sum_after_its_steps_of_a_bucket(sizes: list[int], elements: int, seed: int) -> None:
    draw = random.Random(seed)
    here = cluster(*sizes, island=draw.choice((0, 2)), racks=draw.choice((0, 2)), links=drawn_links(draw))
    devices = [device.name for device in here.devices]
    devices = draw.sample(devices, draw.randint(1, len(devices)))
    numbers = np.random.default_rng(seed)
    parts = {device: numbers.integers(-99, 100, elements) for device in devices}
    total = sum(parts.values(), np.zeros(elements, np.int64))
    made = phases(devices, elements, here)
    assert all({*step.devices} <= {*devices} and len(step.devices) > 1 for step in made)
    assert all((values == total).all() for values in reduced(made, parts).values())
