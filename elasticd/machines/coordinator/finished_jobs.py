"""Jobs that are over leave what the leader knows, and the store: after a while, or when a user says so.

A job that is over is kept, so that people can look at it, and so that a torchrun that comes late is told how
it ended. It goes when it has been over for `keep_seconds`, or when it is the oldest of more than `keep_jobs`.
Its name is free then. So it does not go while a worker of it is known to live: that would be taken for one of a
new job.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from elasticd_planner.readable import readable_duration
from elasticd_planner.value import Value

from elasticd.machines.job.state.events import CoordinatorNote, Effect, EventKind, ForgetAsked, Write
from elasticd.machines.job.state.job_state import OVER, JobPhase, JobSettings, JobState, NodeState
from elasticd.wire.rendezvous import Join

#: Jobs that one look forgets: each is a write, and what is decided meanwhile waits behind them.
AT_ONCE = 8
#: Seconds after which a job that no torchrun waits for any more, before it began, is forgotten: those of an
#: agent that is started again come back. It is at once where the last of them left and nothing was kept of it.
EMPTY_SECONDS = 600.0


class Forgotten(Value, frozen=True, kw_only=True):
    """The consequences of forgetting jobs."""

    jobs: dict[str, JobState]  # those that are left, by name
    effects: tuple[Effect, ...]  # what is to be done


def due(
    jobs: Mapping[str, JobState], nodes: Mapping[str, NodeState], settings: JobSettings, now: float
) -> Forgotten | None:
    """Forgets those whose time is up, the oldest first; None where there are none."""
    left = [
        job.job
        for job in jobs.values()
        if job.phase is JobPhase.GATHERING
        and not job.start.joiners
        and ((job.start.abandoned and not job.highest) or now - job.since >= EMPTY_SECONDS)
    ]
    unbegun = {name: _never_began(now - jobs[name].since) for name in left if jobs[name].highest}
    if left:  # nothing was written of them, but for the history of earlier starts
        jobs = {name: job for name, job in jobs.items() if name not in left or name in unbegun}
    over = sorted((job for job in jobs.values() if job.phase in OVER), key=lambda job: job.since)
    most = max(0, len(over) - settings.keep_jobs)
    old = [job for at, job in enumerate(over) if at < most or now - job.since >= settings.keep_seconds]
    gone = [job for job in old if not living(job, nodes)][:AT_ONCE]
    if not gone and not left:
        return None
    ended = {job.job: f"forgotten: it was over for {readable_duration(now - job.since)}" for job in gone}
    return _without(jobs, {**ended, **unbegun})


def asked(jobs: Mapping[str, JobState], nodes: Mapping[str, NodeState], event: ForgetAsked) -> Forgotten | None:
    """A user wants it. None where it cannot be done: see `refusal`."""
    if event.job not in jobs or refusal(jobs[event.job], nodes):
        return None
    return _without(jobs, {event.job: f"forgotten: {event.by} wants it"})


def refusal(job: JobState, nodes: Mapping[str, NodeState]) -> str:
    """Why a job cannot be forgotten, and what to do; nothing where it can."""
    if job.phase not in OVER:
        return f"job {job.job} is {job.phase.value}: end it first, with 'elasticd stop {job.job}'"
    if devices := living(job, nodes):
        return (
            f"job {job.job} is {job.phase.value}, but its worker on {', '.join(devices)} has not ended yet: "
            "wait for it, or end its process"
        )
    return ""


def is_without_job(job: JobState) -> bool:
    """Returns True if no worker of the job has come to its `elasticd.Job` so far."""
    return job.plan is None and not job.workers and job.phase in (JobPhase.GATHERING, JobPhase.ASSEMBLING)


def begins_again(job: JobState, body: Join, now: float) -> bool:
    """Returns True if this torchrun was started after the job's end, to run it again. A job that finished has
    nothing left to do, unless it is to begin anew. A torchrun of before the end is told how the job ended."""
    if job.phase not in OVER or body.age is None or body.failure is not None:
        return False
    return (job.phase is JobPhase.STOPPED or body.fresh) and now - body.age > job.since


def replaced(jobs: Mapping[str, JobState], name: str, text: str, kind: EventKind) -> Forgotten:
    """Forgets a job whose name another life of it has from now on; `text` says why. The history of its plans
    stays where the job starts again: the numbers of the next plans go on from it."""
    write = Write(job=name, records=(), forget=True, keep_history=kind == "started_again")
    note = CoordinatorNote(
        kind=kind, job=name, text=text, data=_reached(jobs[name])
    )  # before what follows of it
    left = {other: job for other, job in jobs.items() if other != name}
    return Forgotten(jobs=left, effects=(write, note))


def living(job: JobState, nodes: Mapping[str, NodeState]) -> list[str]:
    """The devices of a job that is over whose workers have not ended, as far as their agents can tell."""
    devices = []
    for device, worker in sorted(job.workers.items()):
        node = nodes.get(worker.node)
        if node is not None and node.connected and not worker.left:
            devices.append(device)
    return devices


def _without(jobs: Mapping[str, JobState], gone: Mapping[str, str]) -> Forgotten:
    """gone: why, by job."""
    effects = tuple(
        Write(
            job=name,
            records=(),
            forget=True,
            notes=(CoordinatorNote(kind="forgotten", job=name, text=text, data=_reached(jobs[name])),),
        )
        for name, text in gone.items()
    )
    return Forgotten(jobs={name: job for name, job in jobs.items() if name not in gone}, effects=effects)


def _reached(job: JobState) -> dict[str, int]:
    """The progress of a job: its steps, and the highest number of its plans."""
    return {"step": job.steps.progress.step, "number": job.highest}


def _never_began(seconds: float) -> str:
    waited = readable_duration(seconds)
    return f"forgotten: it was started again, and no torchrun has waited for it for {waited}"


def arrived(job: JobState, node: str) -> JobState:
    """The agent of a node has a new connection, and says again which workers of it live."""
    if job.phase not in OVER:
        return job
    left = {device: worker for device, worker in job.workers.items() if worker.node != node}
    if len(left) == len(job.workers):
        return job
    return msgspec.structs.replace(job, workers=left)
