"""A node, its workers and what may happen to them: the events that the tests of the agent's machine use."""

from __future__ import annotations

from typing import Any

import msgspec
from elasticd_planner.spec.cluster import Device
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.machines.agent.machine import step
from elasticd.machines.agent.state import (
    UNKNOWN,
    AgentSend,
    AgentState,
    AgentTell,
    Effect,
    Event,
    Heard,
    Opened,
    ProposalRead,
    Said,
)
from elasticd.records import JobSpec, NodeRecord, Proposal, decode_proposal, encode
from elasticd.wire.coordinator import FromClient, ToClient
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import FromWorker, Hello, Report, Switched, to_worker

JOB = "job"
RECORD = NodeRecord(
    node="n0",
    devices=tuple(Device(name=f"n0/{i}", memory=1 << 20) for i in range(2)),
    address="127.0.0.1",
    agent="a",
)
MODEL = ModelSpec(name="m", embed=(), kinds=((),), layers=(0, 0), head=())
SPEC = JobSpec(job=JOB, model=MODEL, global_batch=2, micro_batch=1, samples=10, sample_tokens=8.0, seed=0)


def plan(number: int, binding: dict[str, str]) -> Plan:
    names = tuple(binding)
    stage = Stage(start=0, stop=2, devices=names, shares=(1,) * len(names))
    module = ModulePlan(module="m", pipelines=(Pipeline(stages=(stage,), micro_batches=2),))
    return Plan(
        number=number,
        strategies=(Strategy(modules=(module,)),),
        micro_batch=1,
        global_batch=2,
        binding=binding,
    )


def proposal(number: int, new: dict[str, str], old: dict[str, str] | None = None, epoch: int = 5) -> Proposal:
    before = plan(number - 1, old) if old else None
    return Proposal(number=number, epoch=epoch, plan=plan(number, new), old=before)


def read_proposal(record: Proposal, job: str = JOB, revision: int = UNKNOWN) -> ProposalRead:
    """What an agent reads from the store where a leader wrote this."""
    return ProposalRead(job=job, proposal=decode_proposal(encode(record)), revision=revision)


def aborted(open_: Proposal, epoch: int = 5) -> Proposal:
    return msgspec.structs.replace(open_, status="aborted", reason="why", epoch=epoch)


def hello(rank: int, client: str | None = None, job: str = JOB, **changes: Any) -> Opened:
    body = Hello(job=job, local_rank=rank, world_size=2, pid=changes.pop("claims", 100 + rank), spec=SPEC)
    body = msgspec.structs.replace(body, **changes)
    return Opened(client=client or f"w{rank}", body=body, pid=100 + rank, incarnation=f"i{client or rank}")


def join(client: str = "t", pid: int = 7, slot: int | None = None) -> Opened:
    body = Join(job=JOB, min_nodes=1, max_nodes=1, pid=7, slot=slot)
    return Opened(client=client, body=body, pid=pid, incarnation="unused")


def report(n: int) -> Report:
    return Report(
        measurement=Measurement(device="n0/0", plan=1, step=n, tokens=1, block_seconds=1.0, block_work=1.0)
    )


def swapped(number: int) -> Switched:
    return Switched(number=number, step=3, pause_seconds=0.1, bytes_sent=1, bytes_lacking=1, bytes_state=2)


def said(body: FromWorker, client: str = "w0") -> Said:
    return Said(client=client, body=body)


def down(client: str, body: ToClient | object) -> Heard:
    return Heard(message=ToClient(client=client, body=body))  # type: ignore[arg-type]


def run(*events: Event, state: AgentState | None = None, now: float = 0.0) -> tuple[AgentState, list[Effect]]:
    state, effects = state or AgentState(record=RECORD), []
    for event in events:
        state, more = step(state, event, now)
        effects = list(more)
    return state, effects


def told(effects: list[Effect]) -> list[object]:
    """What goes to the leader: bodies of `FromClient`, the other messages whole."""
    messages = [effect.message for effect in effects if isinstance(effect, AgentTell)]
    return [message.body if isinstance(message, FromClient) else message for message in messages]


def sent(effects: list[Effect]) -> list[tuple[str, object]]:
    """What goes to clients, as each decodes it."""
    return [
        (effect.client, to_worker(encode(effect.body))) for effect in effects if isinstance(effect, AgentSend)
    ]
