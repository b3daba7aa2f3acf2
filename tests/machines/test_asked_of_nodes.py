"""What users ask of a node reaches its agent, or is shown as not heard."""

from __future__ import annotations

import msgspec

from elasticd.coordinator.status import node_status
from elasticd.machines.coordinator import machine
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CoordinatorNote,
    CoordinatorSend,
    Effect,
    Event,
    ForgetNodeAsked,
    NodeDrained,
    Paced,
)
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.wire.coordinator import DEVICE_PREFIX, Drain, ToClient
from elasticd.wire.worker import EmulatedSpeed
from tests.machines.cast import node_record

RECORD = node_record("alpha")
DRAINED = msgspec.structs.replace(RECORD, draining=True)


def after(*events: Event) -> tuple[CoordinatorState, list[Effect]]:
    """The leader after these events, and what follows of the last one."""
    state, effects = CoordinatorState(epoch=1), ()
    for event in events:
        state, effects = machine.step(state, event, 1.0)
    return state, list(effects)


def sent(effects: list[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, CoordinatorSend)]


def pending(state: CoordinatorState) -> bool | None:
    return node_status(state.nodes["alpha"], {}, {}, 0).drain_asked


UP, DOWN, DRAIN = AgentUp(record=RECORD), AgentDown(node="alpha"), NodeDrained(node="alpha", on=True)


def test_drain_that_the_agent_has_not_confirmed_is_pending_and_told_again() -> None:
    state, effects = after(UP, DRAIN)
    assert (pending(state), sent(effects)) == (True, [Drain(on=True)])
    state, effects = after(UP, DRAIN, DOWN)
    assert (pending(state), sent(effects)) == (True, [])
    state, effects = after(UP, DRAIN, DOWN, UP)
    assert (pending(state), sent(effects)) == (True, [Drain(on=True)])
    state, effects = after(UP, DRAIN, DOWN, UP, AgentUp(record=DRAINED))
    assert (pending(state), sent(effects)) == (None, []), "it has said so"


def test_drain_that_is_taken_back_before_it_is_confirmed_is_told_too() -> None:
    back = NodeDrained(node="alpha", on=False)
    state, effects = after(UP, DRAIN, back)
    assert (pending(state), sent(effects)) == (False, [Drain(on=False)])
    assert pending(after(UP, DRAIN, back, AgentUp(record=DRAINED))[0]) is False, "it heard the first as yet"
    assert pending(after(UP, DRAIN, back, AgentUp(record=DRAINED), UP)[0]) is None
    state, effects = after(UP, back)
    assert (pending(state), sent(effects)) == (None, []), "it is used already"


def test_speeds_that_chaos_set_are_told_to_an_agent_that_comes_back() -> None:
    slow, normal = Paced(device="alpha/0", factor=3.0), Paced(device="alpha/1", factor=1.0)
    _, effects = after(UP, slow, normal, DOWN, UP)
    assert sent(effects) == [
        ToClient(client=f"{DEVICE_PREFIX}alpha/{index}", body=EmulatedSpeed(factor=factor))
        for index, factor in ((0, 3.0), (1, 1.0))
    ]
    assert sent(after(UP, slow, AgentUp(record=DRAINED))[1]) == [], "it has the connection on which it was told"


def test_speeds_that_chaos_set_outlive_the_leader_that_was_asked() -> None:
    """The agent says which, of its own devices."""
    factors = {"alpha/0": 3.0, "alpha/1": float("inf"), "beta/0": 2.0}
    up = msgspec.structs.replace(UP, factors=factors)
    state, _ = after(up)
    assert state.nodes["alpha"].paces == {"alpha/0": 3.0}
    recovered, _ = after(up, Paced(device="alpha/0", factor=1.0), DOWN, up)
    assert recovered.nodes["alpha"].paces["alpha/0"] == 1.0, "it has not heard of that yet, and is told again"


def test_drain_outlives_the_agent_and_the_leader() -> None:
    """Its node is drained from the first moment of a new agent, which is told, and by a new leader."""
    new = msgspec.structs.replace(RECORD, agent="another")
    state, effects = after(UP, DRAIN, AgentUp(record=DRAINED), DOWN, AgentUp(record=new))
    assert state.nodes["alpha"].record.draining
    assert (pending(state), sent(effects)) == (True, [Drain(on=True)])
    assert not any(isinstance(effect, CoordinatorNote) and effect.kind == "drained" for effect in effects)
    again, effects = after(UP, DRAIN, AgentUp(record=DRAINED), AgentUp(record=new))
    assert sent(effects) == [Drain(on=True)], "its connection came before the end of the last one was seen"
    state, _ = machine.step(state, AgentUp(record=msgspec.structs.replace(new, draining=True)), 2.0)
    assert (pending(state), state.nodes["alpha"].record.draining) == (None, True)
    later = machine.takeover(2, [], JobSettings(), 3.0, drains=again.drains)
    later, effects = machine.step(later, AgentUp(record=new), 3.0)
    assert (later.nodes["alpha"].record.draining, sent(list(effects))) == (True, [Drain(on=True)])


def test_new_leader_has_a_drain_ended_that_the_agent_still_has() -> None:
    ended = machine.takeover(2, [], JobSettings(), 3.0, drains={"alpha": False})
    state, effects = machine.step(ended, AgentUp(record=DRAINED), 3.0)
    assert (pending(state), sent(list(effects))) == (False, [Drain(on=False)])
    state, _ = machine.step(state, AgentUp(record=RECORD), 4.0)
    assert (pending(state), state.nodes["alpha"].record.draining) == (None, False)


def test_wish_to_drain_goes_with_a_node_that_is_forgotten_and_stays_with_one_that_left() -> None:
    left = AgentDown(node="alpha", left=True)
    state, _ = after(UP, DRAIN, AgentUp(record=DRAINED), left)
    assert (state.nodes, state.drains) == ({}, {"alpha": True})
    state, _ = after(UP, DRAIN, DOWN, ForgetNodeAsked(node="alpha", by="alice"))
    assert (state.nodes, state.drains) == ({}, {})


def test_wishes_of_nodes_that_never_come_back_are_bounded() -> None:
    state = CoordinatorState(epoch=1, settings=JobSettings(keep_nodes=3), drains=dict.fromkeys("abcdef", True))
    state, _ = machine.step(state, UP, 1.0)
    state, _ = machine.step(state, DRAIN, 1.0)
    assert list(state.drains) == ["d", "e", "f", "alpha"]
