"""The player of reductions: times that can be counted by hand."""

import sys
from pathlib import Path

import pytest
from elasticd_planner.layout.lowering import BucketStep, phases

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _two_level as two_level


def test_a_ring_inside_a_node_takes_its_hops() -> None:
    here, network = two_level.cluster([4])
    devices = [device.name for device in here.devices]
    elements = 4 * 1000
    hop = two_level.INSIDE.seconds(1000 * two_level.FLOAT)
    play = two_level.Player(network=network).play(two_level.flat(devices, elements))
    assert play == pytest.approx(6 * hop)
    whole = ((0, elements),)
    parts = tuple(((at * 1000, (at + 1) * 1000),) for at in range(4))
    for operation in ("reduce_scatter", "all_gather"):
        step = BucketStep(operation, tuple(devices), parts)  # type: ignore[arg-type]
        assert two_level.Player(network=network).play((step,)) == pytest.approx(3 * hop)
    twice = (*two_level.flat(devices, elements), BucketStep("all_reduce", tuple(devices), (whole,) * 4))
    assert two_level.Player(network=network).play(twice) == pytest.approx(12 * hop)


def test_a_node_shares_its_card_and_devices_with_cards_do_not() -> None:
    here, network = two_level.cluster([2, 2])
    elements = 1 << 22
    pairs = tuple(BucketStep("all_reduce", (f"n0/{i}", f"n1/{i}"), (((0, elements),),) * 2) for i in range(2))
    one = two_level.Player(network=network).play(pairs[:1])
    assert one == pytest.approx(2 * two_level.CARD.seconds(elements / 2 * two_level.FLOAT))
    both = two_level.Player(network=network).play(pairs)
    sent = 2 * elements * two_level.FLOAT / two_level.CARD.bandwidth  # of a ring of two: all of it, twice
    assert sent <= both <= 2 * one
    own = two_level.Network(node=network.node, rack=network.rack, cards=True)
    assert two_level.Player(network=own).play(pairs) == pytest.approx(one)
    assert len(phases([device.name for device in here.devices], 1 << 10, here)) > 1


@pytest.mark.parametrize(("sizes", "racks"), [([8] * 8, 0), ([3, 2, 4, 1], 0), ([2] * 6, 2)])
def test_no_bucket_takes_longer_than_one_ring(sizes: list[int], racks: int) -> None:
    found = two_level.ratios(sizes, racks=racks)
    assert max(found.values()) <= 1.0
    assert min(found.values()) < 0.8
