"""`MachineRunner`: drives the coordinator's machine, for the daemon's leader and for the simulator's.

How to drive it. Events go in one at a time, each with the machine's clock, which never goes back. Each step
returns the next state and its effects. Effects are carried out in their order, after the step and before the
next one. None may raise for what the outside does: a node that is gone, a store that is away.

Writes reach the store in their order. Agents read a write's records there, and its own notes are told once the
store has it, so that nobody hears of what may be lost. All other effects may be lost with their leader. Agents
repeat what they said to the next one, and asks for a plan are made again.

An event on which the machine fails changes nothing. Where it is a message of an agent it is dropped; any other
one ends the leader, rather than have it go on with a state that nobody decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from elasticd.machines.coordinator import machine
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import (
    CancelPlan,
    CoordinatorNote,
    CoordinatorSend,
    Effect,
    Event,
    Log,
    RequestPlan,
    Write,
)


class EffectPorts(Protocol):
    """Carries effects out, one method for each kind."""

    def record(self, note: CoordinatorNote) -> None:
        """An event of the journal, for people."""

    def log(self, line: Log) -> None:
        """A line of the log alone."""

    def send(self, message: CoordinatorSend) -> None:
        """A message to a node's agent. It may be lost with the connection."""

    def write(self, write: Write) -> None:
        """Records of a job, for the store."""

    def request_plan(self, request: RequestPlan) -> None:
        """Asks the planner. Its answer is the event `Planned`."""

    def cancel_plan(self, request: CancelPlan) -> None:
        """The planner's answer is not needed any more."""


_PORTS: dict[type[Effect], Callable[[EffectPorts, Any], None]] = {
    CoordinatorNote: lambda ports, effect: ports.record(effect),
    Log: lambda ports, effect: ports.log(effect),
    CoordinatorSend: lambda ports, effect: ports.send(effect),
    Write: lambda ports, effect: ports.write(effect),
    RequestPlan: lambda ports, effect: ports.request_plan(effect),
    CancelPlan: lambda ports, effect: ports.cancel_plan(effect),
}


class MachineRunner:
    """The machine's state, and the ports through which its effects go."""

    def __init__(self, state: CoordinatorState, ports: EffectPorts) -> None:
        self.state = state
        self._ports = ports

    def step(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Takes an event. Returns its effects, which are to be performed next. If it raises, nothing changed.

        Args:
            event: of an agent, a user, the planner, the store or the clock.
            now: the machine's clock [s].
        """
        self.state, effects = machine.step(self.state, event, now)
        return effects

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carries effects out, in their order."""
        for effect in effects:
            _PORTS[type(effect)](self._ports, effect)
