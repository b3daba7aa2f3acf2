"""The leader's view of links: probes and moves judged apart, a slow link told, and no device for it."""

from __future__ import annotations

from typing import Any

import pytest
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.spec.cluster import Link

from elasticd.machines.coordinator import machine, node_links
from elasticd.machines.coordinator.node_links import GATHER_SECONDS, Links, crossed, judge, moved
from elasticd.machines.job.state.events import CoordinatorNote, CoordinatorTick, Received
from elasticd.wire.coordinator import Crossed, FromClient
from elasticd.wire.worker import Switched
from tests.machines.test_recovery import running
from tests.machines.world import World

RING = ("n0", "n1", "n2", "n3")
MIB = 1 << 20


def probe(target: str, factor: float = 1.0, size: int = 4 * MIB) -> Crossed:
    return Crossed(target=target, size=size, seconds=0.01 * factor, latency=1e-4 * factor)


def swapped(device: str, flows: dict[str, tuple[int, float]]) -> FromClient:
    body = Switched(
        number=2, step=1, pause_seconds=0.1, bytes_sent=0, bytes_lacking=0, bytes_state=0, flows=flows
    )
    return FromClient(client="w", job="demo", device=device, incarnation="i", body=body)


def test_one_link_of_a_ring_that_becomes_slow_is_told_and_then_that_it_recovered() -> None:
    links, now, told = Links(), 0.0, []
    for turn in range(16):
        for at, source in enumerate(RING):
            target = RING[(at + 1) % len(RING)]
            slow = {source, target} == {"n1", "n2"} and 4 <= turn < 10
            links = crossed(links, source, probe(target, 3.0 if slow else 1.0), RING, now)
        now += GATHER_SECONDS
        links, changes = judge(links, Link(), DetectSettings(), now)
        told += [(kind, change.device, change.kind) for kind, change in changes]
        if turn == 9:
            assert links.rate("n1 - n2") > 2.5
            assert links.rate("n0 - n1") == 1.0
    assert told[0] == ("probe", "n1 - n2", "slow")
    assert told[-1] == ("probe", "n1 - n2", "recovered")
    assert {device for _, device, _ in told} == {"n1 - n2"}
    assert links.probes["n0 - n1"].bandwidth == 4 * MIB / 0.01


def test_what_came_in_a_move_counts_by_node_and_only_where_it_is_much() -> None:
    flows = {"n1/0": (8 * MIB, 0.2), "n1/1": (8 * MIB, 0.3), "n0/1": (9 * MIB, 0.1), "n2/0": (1000, 0.1)}
    links = moved(Links(), swapped("n0/0", flows), RING, 1.0)
    ((kind, transfer),) = links.gathered
    assert (kind, transfer.name, transfer.size, transfer.seconds) == ("move", "n0 - n1", 16 * MIB, 0.3)
    assert moved(Links(), swapped("n0/0", {"n1/0": (MIB, float("inf"))}), RING, 1.0).gathered == ()


HUGE = [
    Crossed(target="n1", size=2**62, seconds=1e-320, latency=1e-320),
    Crossed(target="n1", size=10**400, seconds=1.0, latency=1.0),
    Crossed(target="n1", size=1, seconds=1e300, latency=1e300),
    Crossed(target="n1", size=2**50, seconds=1e-7, latency=1e-7),
    Crossed(target="n1", size=1, seconds=1e6, latency=1e6),
]
FLOWS = [{"n1/0": (2**60, 1e-320)}, {"n1/0": (10**400, 1.0)}, {"n1/0": (2**50, 1e-7)}, {"n1/0": (2**21, 1e6)}]


@pytest.mark.parametrize("said", [*HUGE, *FLOWS], ids=lambda said: repr(said)[:60])
def test_no_number_that_a_node_says_ends_who_judges_the_links(said: Any) -> None:
    links = Links()
    for turn in range(3):
        if isinstance(said, Crossed):
            links = crossed(links, "n0", said, RING, float(turn))
        else:
            links = moved(links, swapped("n0/0", said), RING, float(turn))
        links = crossed(links, "n2", probe("n3"), RING, float(turn))
        links, _ = judge(links, Link(), DetectSettings(), turn + GATHER_SECONDS)


def test_a_defect_in_judging_links_costs_what_was_gathered_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("by a node")

    monkeypatch.setattr(node_links, "judge", broken)
    world = running()
    state, effects = machine.step(world.state, CoordinatorTick(), world.now + 1)
    (note,) = [effect for effect in effects if isinstance(effect, CoordinatorNote)]
    assert (note.kind, "ZeroDivisionError: by a node" in note.text) == ("defect", True)
    assert state.links.gathered == ()


def test_what_makes_no_sense_is_not_heard() -> None:
    wrongs = probe("n0"), probe("n1", 0.0), probe("n1", float("nan")), probe("n1", size=0), probe("unknown")
    for wrong in wrongs:
        assert crossed(Links(), "n0", wrong, RING, 0.0) == Links()
    assert crossed(Links(), "n0", probe("n1"), RING, 0.0) != Links()


def slowed(world: World) -> None:
    """A link gets slow, as its nodes' agents see it."""
    for turn in range(16):
        for source, target in (("alpha", "beta"), ("beta", "alpha")):
            world.say(Received(node=source, message=probe(target, 4.0 if turn > 9 else 1.0)))
        world.settle()
        world.tick(GATHER_SECONDS + 1)


def test_a_slow_link_is_no_devices_slowness() -> None:
    world = running()
    world.train(5)
    slowed(world)
    (note,) = [note for note in world.notes if note.kind == "link"]
    assert "alpha - beta is slow" in note.text
    assert "probed" in note.text
    assert "slow" not in world.kinds()
    assert world.job.detection.rates.rates == {}
