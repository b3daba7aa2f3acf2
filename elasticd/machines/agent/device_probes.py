"""Which of a node's devices an agent has probed now: those that stand by, never one that a plan has work for.

A worker is asked as soon as it is there, before any plan can have a place for it, and then again and again
while no plan, in force or open, is bound to it. It has the last word: one that computes does not answer.
"""

from __future__ import annotations

from dataclasses import replace

from elasticd.machines.agent.state import Client, Send, State
from elasticd.wire.messages import Hello
from elasticd.wire.probes import Probe


def due(state: State, now: float) -> tuple[State, tuple[Send, ...]]:
    """Asks those whose time has come."""
    asked = [client for client in state.clients.values() if _due(state, client, now)]
    if not asked:
        return state, ()
    clients = {**state.clients, **{client.id: replace(client, asked=now) for client in asked}}
    return replace(state, clients=clients), tuple(Send(client=client.id, body=Probe()) for client in asked)


def _due(state: State, client: Client, now: float) -> bool:
    if not isinstance(client.opening, Hello) or not client.opening.probes or client.frozen or client.goodbye:
        return False
    if client.asked is not None and not 0 < state.probe_seconds <= now - client.asked:
        return False
    record, proposal = state.plans.get(client.job), state.proposals.get(client.job)
    plans = (
        record.plan if record is not None else None,
        proposal.plan if proposal is not None and proposal.status == "open" else None,
    )
    return not any(plan is not None and plan.binding.get(client.device) == client.incarnation for plan in plans)
