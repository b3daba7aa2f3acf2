"""A job whose workers run a plan that the store lacks: etcd was lost under it, and set up anew.

Its workers train on, since no leader is needed for a step. They come back to their agents, and say which plan
they run. A leader without the job's records does not know what was decided besides: another plan may be
prepared somewhere, or a worker may be fenced off. So it leaves the job alone: it proposes and ends nothing, and
says so in the job's reason and in an event. Its devices stay taken. A user who has looked has the plan written
back by `elasticd adopt`; from then on the job is as after any change of leaders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from elasticd.machines.job import assembly
from elasticd.machines.job.lifecycle import stop_request
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.state.events import AdoptAsked, StopAsked, Stored
from elasticd.machines.job.state.job_state import JobPhase, JobState
from elasticd.machines.job.state.restored_job import restored
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import PlanRecord
from elasticd.wire.coordinator import FromClient, Unread, WorkerLost
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import Hello, RunningPlan


def trains_unknown(job: JobState, body: object) -> bool:
    """Returns True for the hello of a worker that runs a plan, where the leader knows no plan of its job."""
    return (
        isinstance(body, Hello)
        and body.running is not None
        and bool(body.incarnation)
        and job.plan is None
        and job.proposal is None
        and not job.highest
        and job.phase in (JobPhase.GATHERING, JobPhase.ASSEMBLING)
    )


def meet(turn: Transaction, node: str, up: FromClient, body: Hello) -> None:
    """A worker of a job that is left alone. One that stands by runs no plan."""
    if turn.job.phase is JobPhase.GATHERING:
        turn.enter(JobPhase.ASSEMBLING)
    turn.worker(assembly.new_worker(turn, node, up, body))
    adopts, running = turn.job.takeover.unadopted is not None, _newer(turn.job.takeover.unadopted, body.running)
    assert running is not None
    spec = assembly.with_known_bytes(body.spec, turn.job.spec)
    turn.set(spec=spec)
    turn.change("takeover", unadopted=running)
    turn.change("start", world_size=body.world_size, arrived=turn.now)
    turn.set(reason=words(turn.job))
    if not adopts:
        turn.note("waiting", turn.job.reason, number=running.plan.number)


def _newer(one: RunningPlan | None, other: RunningPlan | None) -> RunningPlan | None:
    """The later plan, which a worker that has switched to it decided for all; the highest number of both."""
    if one is None or other is None:
        return one or other
    newer = other if other.plan.number > one.plan.number else one
    return msgspec.structs.replace(newer, highest=max(one.highest, other.highest))


def words(job: JobState) -> str:
    """The reason of a job that is left alone, for people."""
    assert job.takeover.unadopted is not None
    plan = job.takeover.unadopted.plan
    absent = [device for device, one in plan.binding.items() if job.worker(device, one) is None]
    there = f"; of its members {', '.join(absent[:8])} {'is' if len(absent) == 1 else 'are'} not heard of"
    return (
        f"its workers run plan {plan.number}, which etcd lacks: they train on, and nothing is decided; "
        f"'elasticd adopt {job.job}' writes the plan to etcd again{there if absent else ''}"
    )


def adopt(turn: Transaction, event: AdoptAsked) -> None:
    """Writes the plan back, as its members say that they run it. The job is then as a new leader finds it."""
    before, running = turn.job, turn.job.takeover.unadopted
    assert running is not None
    assert before.spec is not None
    record = PlanRecord(plan=running.plan, epoch=turn.epoch, step=running.step)
    after = restored(Stored(job=before.job, spec=before.spec, plan=record), turn.now, turn.settings)
    met = {device: worker.incarnation for device, worker in before.workers.items()}
    turn.job = msgspec.structs.replace(
        after, highest=max(after.highest, running.highest), workers=before.workers
    )
    turn.change(
        "start",
        world_size=before.start.world_size,
        joiners=before.start.joiners,
        arrived=before.start.arrived,
    )
    unmet = {device: one for device, one in after.takeover.unmet.items() if met.get(device) != one}
    turn.change("takeover", unmet=unmet)
    text = f"{event.by} has plan {record.plan.number} written to etcd again, as its workers run it"
    turn.write(
        before.spec, record, notes=(turn.told("recorded", text, number=record.plan.number, step=record.step),)
    )


def _lost(turn: Transaction, node: str, gone: WorkerLost) -> None:
    """A worker ended. With the last one the job is over: nothing else knows of it."""
    if turn.job.worker(gone.device, gone.incarnation) is None:
        return
    turn.drop(gone.device)
    turn.note("worker_lost", f"worker {gone.device} ended: {gone.how}", device=gone.device, clean=gone.clean)
    if turn.job.workers:
        turn.set(reason=words(turn.job))
    else:
        stop(turn, f"its workers ended, and etcd did not have their plan: {gone.how}", orderly=gone.clean)


def _join(turn: Transaction, node: str, up: FromClient, body: Join) -> None:
    """A torchrun that has workers, heard of again; one that has none waits until the job is adopted."""
    assembly.remember(turn, node, up, body)


def _hello(turn: Transaction, node: str, up: FromClient, body: Hello) -> None:
    """A worker comes back, or one that had is heard of again."""
    if (known := turn.job.worker(up.device, up.incarnation)) is None:
        meet(turn, node, up, body)
    else:
        turn.worker(known, node=node, client=up.client, orphan=False)


def _stop(turn: Transaction, event: StopAsked) -> None:
    stop_request.at_once(turn, event)


#: What a job that is left alone takes; anything else changes nothing, and is said again once it is adopted.
ALONE: dict[type, Callable[..., None]] = {
    Hello: _hello,
    Join: _join,
    Unread: assembly.unread,
    WorkerLost: _lost,
    StopAsked: _stop,
    AdoptAsked: adopt,
}


def hear(turn: Transaction, kind: type, heard: tuple[Any, ...]) -> None:
    """Applies an event to a job that is left alone."""
    if (handler := ALONE.get(kind)) is not None:
        handler(turn, *heard)


def refusal(job: JobState) -> str:
    """Why a job cannot be adopted, or nothing where it can."""
    if job.takeover.unadopted is None:
        return f"job {job.job} is {job.phase.value}, and what it runs is in etcd: there is nothing to adopt"
    return ""
