"""The job machine's table: each event in each phase has one handler, or the log has a line of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.policy.policy import PolicySettings

from elasticd.machines.job import machine
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CheckpointAsked,
    Configured,
    CoordinatorTick,
    Event,
    Log,
    Planned,
    Received,
    StopAsked,
    Unwritten,
)
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, Worker, fresh
from elasticd.machines.job.state.transaction import MOST_UNEXPECTED, Transaction
from elasticd.wire.coordinator import FromClient, OfNode
from elasticd.wire.worker import FromWorker, StoreCall
from tests.machines.cast import JOB, node_record
from tests.releases.samples import sample

#: What the leader answers itself, or keeps of a node: no job hears of it.
ELSEWHERE = {StoreCall, *get_args(OfNode)}
DEVICE, INCARNATION = "alpha/0", "i"
WORKER = Worker(device=DEVICE, incarnation=INCARNATION, node="alpha", client="w", pid=1)
OF_LEADER: tuple[Event, ...] = (
    CoordinatorTick(),
    Configured(detect=DetectSettings(), policy=PolicySettings(), changes=""),
    AgentUp(record=node_record("alpha")),
    AgentDown(node="alpha"),
    Planned(job=JOB, token=-1),
    Unwritten(job=JOB, records=("plan",), reason="too large"),
    StopAsked(job=JOB, by="someone", seconds=1.0),
    CheckpointAsked(job=JOB),
)


def kinds() -> Iterator[type]:
    """All that the coordinator hands to a job, by the type under which the table has it."""
    yield from map(type, OF_LEADER)
    messages = get_args(msgspec.structs.fields(Received)[1].type)
    for kind in (*messages, *get_args(FromWorker)):
        if kind is not FromClient and kind not in ELSEWHERE:
            yield kind


def event_of(kind: type) -> Event:
    for event in OF_LEADER:
        if type(event) is kind:
            return event
    if kind not in get_args(FromWorker):
        message: Any = sample(kind)
    else:
        body = sample(kind)
        message = FromClient(client="w", job=JOB, device=DEVICE, incarnation=INCARNATION, body=body)
    return Received(node="alpha", message=message)


def turn_in(phase: JobPhase) -> Transaction:
    job = msgspec.structs.replace(fresh(JOB, phase, 0.0), workers={DEVICE: WORKER})
    return Transaction(job, {}, 1, JobSettings(), 1.0)


def test_no_event_has_two_rows_for_a_phase_and_none_is_of_no_use() -> None:
    assert sum(len(phases) for _, phases, _ in machine.ROWS) == len(machine.TABLE)
    assert {event for _, event in machine.TABLE} == {*kinds()}


def test_due_looks_are_in_phases_and_each_is_there_once() -> None:
    assert all(phases for _, phases, _ in machine.DUE)
    assert len({act for act, _, _ in machine.DUE}) == len(machine.DUE)


@pytest.mark.parametrize("phase", JobPhase)
def test_an_event_that_a_phase_has_nothing_for_is_logged_once(phase: JobPhase) -> None:
    missing = [kind for kind in kinds() if (phase, kind) not in machine.TABLE]
    assert missing or phase in (JobPhase.PROPOSED, JobPhase.ABORTING, JobPhase.RUNNING, JobPhase.RECOVERING)
    turn = turn_in(phase)
    before = turn.job
    for number, kind in enumerate(missing, 1):
        for _ in range(3):
            machine._dispatch(turn, event_of(kind))
        assert len(turn.effects) == number
        line = f"{kind.__name__} while {phase.value}: nothing follows from it"
        assert turn.effects[-1] == Log(job=JOB, text=line)
    assert msgspec.structs.replace(turn.job, unexpected=frozenset()) == before


def test_the_log_has_so_many_lines_of_a_job_and_no_more() -> None:
    turn = turn_in(JobPhase.RUNNING)
    for number in range(2 * MOST_UNEXPECTED):
        turn.unexpected(f"event {number}")
    assert len(turn.effects) == MOST_UNEXPECTED


def test_who_is_no_worker_of_the_job_fills_no_log() -> None:
    turn = turn_in(JobPhase.GATHERING)
    for kind in get_args(FromWorker):
        if (JobPhase.GATHERING, kind) not in machine.TABLE:
            up = FromClient(client="w", job=JOB, device=DEVICE, incarnation="another", body=sample(kind))
            machine._dispatch(turn, Received(node="alpha", message=up))
    assert turn.effects == []
