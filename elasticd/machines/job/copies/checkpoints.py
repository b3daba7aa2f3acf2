"""A job's checkpoints as its leader sees them: which a start may use, and which may get their names.

Publishing is the leader's, so that of two gangs that both take themselves for the job only one makes
checkpoints: the other's leader was replaced and cannot write.

A job that goes back to an older state leaves checkpoints of later steps behind: they are dead. One that is
whole meanwhile waits, and is published if the job goes on after all. One that was published may have its name
on disk, where a start would take it for the newest: so the members make another one at once.
"""

from __future__ import annotations

from msgspec.structs import replace

from elasticd.machines.job.copies.rollback import called
from elasticd.machines.job.state.events import CheckpointAsked, CoordinatorNote
from elasticd.machines.job.state.job_state import JobPhase, JobState, Worker
from elasticd.machines.job.state.last_checkpoint import is_dead, newest
from elasticd.machines.job.state.snapshot_sets import Moment
from elasticd.machines.job.state.transaction import Transaction
from elasticd.names import harmless
from elasticd.records import CheckpointsRecord, PublishedCheckpoint
from elasticd.wire.worker import Saved, SaveFailed, SaveNow

#: Phases in which the members of a plan make steps.
TRAINING = frozenset({JobPhase.RUNNING, JobPhase.PROPOSED, JobPhase.ABORTING})
#: Published checkpoints that are kept in the store for a job.
MOST_PUBLISHED = 64
#: Checkpoints that may wait for a plan to be recorded. A job has one under way at a time.
MOST_WAITING = 8
#: Seconds from one writing of the list to the next where it is only said again.
AGAIN_SECONDS = 1.0


class NotShared(ValueError):
    """The workers see different checkpoints; the message says who sees what, and what to do."""


def offered(job: JobState) -> tuple[str, ...]:
    """The checkpoints that a job's first plan may start from, the newest first: those that all workers see.

    Raises `NotShared` where some see checkpoints but none that all see: to start anew would lose them.
    """
    if job.plan is not None or not job.workers or job.start.fresh:
        return ()
    seen = {worker.device: worker.checkpoints for worker in job.workers.values()}
    common = set.intersection(*(set(names) for names in seen.values()))
    some = max(seen, key=lambda device: len(seen[device]))
    if seen[some] and not common:
        other = next(device for device, names in seen.items() if seen[some][0] not in names)
        raise NotShared(
            f"worker {some} sees the checkpoint {seen[some][0]}, worker {other} does not: the folder of "
            "checkpoints must be one that all nodes share"
        )
    return tuple(name for name in seen[some] if name in common)


def saved(turn: Transaction, worker: Worker, body: Saved) -> None:
    """A worker says that a checkpoint is whole on disk."""
    _publish(turn, body)


def failed(turn: Transaction, worker: Worker, body: SaveFailed) -> None:
    """A rank says why a checkpoint is not made. A new leader may hear it of one that others followed."""
    job, last = turn.job, newest(turn.job)
    if last is not None and (last.plan, last.step) >= (body.plan, body.step):
        return
    if not body.skipped:
        if job.checkpoints.unmade is not None and (
            job.checkpoints.unmade.plan,
            job.checkpoints.unmade.step,
        ) == (body.plan, body.step):
            return  # of another rank: one reason is told
        turn.change("checkpoints", unmade=body)
    text = f"no checkpoint of step {body.step}: {worker.device} {body.reason}"
    data = {"step": body.step, "plan": body.plan, "reason": body.reason, "skipped": body.skipped}
    turn.note("checkpoint_failed", text, device=worker.device, **data)


def refusal(job: JobState) -> str:
    """Why no member of a job's plan can be asked for a checkpoint now, or nothing."""
    if job.plan is None or job.phase not in TRAINING:
        return f"job {job.job} trains under no plan now (it is {job.phase.value}): ask once it does"
    members = [job.workers[device] for device in job.plan.members if device in job.workers]
    if len(members) < len(job.plan.members):
        return f"not all workers of job {job.job} have come back to this coordinator yet: try again"
    if _told(job) is None:
        return f"no worker of job {job.job} can be reached now: try again"
    if unable := sorted(member.device for member in members if not member.saves_now):
        return (
            f"the workers of job {job.job} make no checkpoint when they are asked ({', '.join(unable[:3])}): "
            "the job has no folder for checkpoints (CheckpointingOptions(folder=...)), or runs an older release"
        )
    return ""


def _told(job: JobState) -> Worker | None:
    """The first member of the plan that hears: the one that is told."""
    members = (job.workers.get(device) for device in (job.plan.members if job.plan is not None else ()))
    return next((each for each in members if each and not (each.left or each.frozen or each.orphan)), None)


def asked(turn: Transaction, event: CheckpointAsked) -> None:
    """Tells one member: the others learn of it by the vote. Should it be lost with the word, nothing is made;
    whoever asked sees no checkpoint, and asks again."""
    worker = _told(turn.job)
    if worker is not None and not refusal(turn.job):
        turn.send(worker.node, worker.client, SaveNow())


def _publish(turn: Transaction, body: Saved) -> None:
    """Publishes a checkpoint whose plan is recorded. It is written again when it is said again: the agent may
    not have taken the word of a leader before this one. One writing answers all who said so: see `due`."""
    job = turn.job
    if not harmless(body.name):
        return  # no saver gives such a name
    if job.snapshots.dead(Moment(body.plan, body.step)):
        return  # its saver gives it up once it has heard of the step that the job goes on from
    if _waits(job, body):
        waiting = tuple(one for one in job.checkpoints.unpublished if one.name != body.name)
        turn.change("checkpoints", unpublished=(*waiting, body)[-MOST_WAITING:])
        return
    this = PublishedCheckpoint(name=body.name, step=body.step, plan=body.plan)
    if any(one.name == this.name for one in job.checkpoints.published):
        turn.change("checkpoints", republish=True)
        due(turn)
        return
    turn.change(
        "checkpoints",
        published=(*job.checkpoints.published, this)[-MOST_PUBLISHED:],
        checkpoint_at=turn.now,
        unmade=None,
    )
    note = turn.told("checkpoint", f"checkpoint {body.name}", step=body.step, plan=body.plan, name=body.name)
    _write(turn, note)


def _waits(job: JobState, body: Saved) -> bool:
    """Returns True while a checkpoint is not published: its plan is not recorded (a fence closed it before, or
    this leader is yet to hear of it), or the job is about to go back to an older state."""
    if body.plan > job.number:
        return True
    proposal = job.proposal if job.phase is JobPhase.PROPOSED else None
    if proposal is None or proposal.recovery is None or not called(proposal):
        return False
    return proposal.recovery.step < body.step


def due(turn: Transaction) -> None:
    """Publishes what need not wait any more, and writes the list again for those who said again what is in it,
    all of them at once."""
    _publish_waiting(turn)
    job = turn.job
    if job.checkpoints.republish and turn.now - job.checkpoints.published_at >= AGAIN_SECONDS:
        _write(turn)


def _write(turn: Transaction, *notes: CoordinatorNote) -> None:
    turn.write(CheckpointsRecord(published=turn.job.checkpoints.published, epoch=turn.epoch), notes=notes)
    turn.change("checkpoints", republish=False, published_at=turn.now)


def _publish_waiting(turn: Transaction) -> None:
    """A saver says it once, and is busy until it is published."""
    ready = [body for body in turn.job.checkpoints.unpublished if not _waits(turn.job, body)]
    if ready:
        turn.change(
            "checkpoints",
            unpublished=tuple(body for body in turn.job.checkpoints.unpublished if body not in ready),
        )
        for body in ready:
            _publish(turn, body)


def recorded(turn: Transaction) -> None:
    """A plan was recorded: what waited for it is published. If the job went back, checkpoints of later steps
    are dead from now on."""
    job = turn.job
    published = tuple(replace(one, dead=is_dead(job, one)) for one in job.checkpoints.published)
    if published != job.checkpoints.published:
        turn.change("checkpoints", published=published)
        _write(turn)
        asked(turn, CheckpointAsked(job=job.job))
    _publish_waiting(turn)
