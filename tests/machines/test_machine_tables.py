"""The tables by which events, messages and effects are dispatched: each type of a union has its handler."""

from __future__ import annotations

from typing import Any, get_args

from elasticd.coordinator import leader
from elasticd.machines.agent import machine as agent
from elasticd.machines.agent.state import AgentPhase
from elasticd.machines.agent.state import Event as AgentEvent
from elasticd.machines.coordinator import machine as coordinator
from elasticd.machines.job.state.events import Event
from elasticd.wire.coordinator import ToLeader, Unread
from elasticd.wire.launch import OutputPart
from elasticd.wire.worker import FromWorker, Statement


def types(union: Any) -> set[type]:
    inner = get_args(union)
    return set().union(*map(types, inner)) if inner else {union}


def test_each_event_has_a_handler_in_the_machines_of_agent_and_coordinator() -> None:
    assert {kind for _, kind in agent.TABLE} == types(AgentEvent)
    assert {kind for phase, kind in agent.TABLE if phase is AgentPhase.OVER} == types(AgentEvent)
    assert coordinator.TABLE.keys() == types(Event)


def test_an_event_of_the_agent_that_fails_costs_itself_or_names_its_job() -> None:
    """`failed` takes link and tick apart; for other events without a handler it lets a job's workers go."""
    apart = {"LinkUp", "AgentTick"}
    others = {kind for kind in types(AgentEvent) - agent.FAILED.keys() if kind.__name__ not in apart}
    assert all("job" in kind.__annotations__ for kind in others)


def test_each_message_to_the_leader_and_of_a_worker_has_a_handler() -> None:
    assert leader.HANDLERS.keys() == (types(ToLeader) | {Unread}) - {OutputPart}
    kept = types(FromWorker) - agent.OF_CLIENT.keys()
    assert kept >= types(Statement), "a statement is kept for a new leader"
