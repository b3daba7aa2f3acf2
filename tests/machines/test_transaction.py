"""What all members say alike costs the leader one long look in all, not one each: a thousand may say it."""

from __future__ import annotations

from collections import Counter

import pytest

from elasticd.machines.job import machine
from elasticd.machines.job.state.events import Event, Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.coordinator import FromClient
from elasticd.wire.worker import Prepared, Report, StateReport, Switched
from tests.machines.test_recovery import recovered
from tests.machines.world import World

_NODES = ("alpha", "beta", "gamma", "delta")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Messages by kind, and the long looks ("due Prepared") that followed them."""
    counted: Counter[str] = Counter()
    last = [""]
    hear, due = machine._dispatch, machine._due

    def heard(turn: Transaction, event: Event) -> None:
        if isinstance(event, Received):
            said = event.message
            last[0] = type(said.body if isinstance(said, FromClient) else said).__name__
            counted[last[0]] += 1
        hear(turn, event)

    def looked(turn: Transaction) -> None:
        counted[f"due {last[0]}"] += 1
        last[0] = ""
        due(turn)

    monkeypatch.setattr(machine, "_dispatch", heard)
    monkeypatch.setattr(machine, "_due", looked)
    return counted


def test_one_look_for_all_that_prepared_and_for_all_that_swapped(looks: Counter[str]) -> None:
    world = World(_NODES)
    for node in _NODES:
        world.join(node, least=4, most=4)
    world.settle()
    world.train(3)
    assert world.phase is JobPhase.RUNNING
    members = len(world.job.plan.members) if world.job.plan is not None else 0
    assert members > 4
    for body in (Prepared, Switched):
        assert looks[body.__name__] == members
        assert looks[f"due {body.__name__}"] <= 1
    assert looks[Report.__name__] == 3 * members
    assert looks[f"due {Report.__name__}"] <= 3, "once for each whole step"


def test_what_each_of_many_says_waits_for_a_tick(looks: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a death every survivor says what it holds; a broken switch takes many agents away at once."""
    monkeypatch.setattr(machine, "MANY", 4)
    world = World(_NODES)
    for node in _NODES:
        world.join(node, least=4, most=4)
    world.settle()
    for _ in range(20):
        world.tick()
    world.train(3)
    assert world.phase is JobPhase.RUNNING
    looks.clear()
    for node in _NODES[1:]:
        world.disconnect(node)
        world.reconnect(node)
    assert not [name for name in looks if name.startswith("due")], looks
    world.kill("alpha/0")
    for _ in range(20):
        world.tick()
    assert recovered(world), world.job.reason
    assert looks[StateReport.__name__] >= 7
    assert looks[f"due {StateReport.__name__}"] <= 2, looks
