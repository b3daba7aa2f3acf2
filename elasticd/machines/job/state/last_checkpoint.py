"""The newest checkpoint of a job, beside its newest step: which steps would be made again."""

from __future__ import annotations

from elasticd_planner.readable import counted

from elasticd.machines.job.state.job_state import JobState
from elasticd.machines.job.state.snapshot_sets import Moment
from elasticd.records import PublishedCheckpoint


def is_dead(job: JobState, checkpoint: PublishedCheckpoint) -> bool:
    """Returns True if the job went back to a step before a checkpoint: it is no part of the job's history."""
    return checkpoint.dead or job.snapshots.dead(Moment(checkpoint.plan, checkpoint.step))


def newest(job: JobState) -> PublishedCheckpoint | None:
    """The newest checkpoint that the job published, of those that are a part of its history."""
    published = (one for one in job.checkpoints.published if not is_dead(job, one))
    return max(published, key=lambda one: (one.plan, one.step), default=None)


def lost_steps(job: JobState) -> int:
    """The steps of a job that ends now since its newest checkpoint; 0 without a folder for any."""
    checkpoint = newest(job)
    if checkpoint is None and not any(worker.saves_now for worker in job.workers.values()):
        return 0
    return max(0, job.steps.progress.step - _saved_step(job))


def _saved_step(job: JobState) -> int:
    checkpoint = newest(job)
    return checkpoint.step if checkpoint is not None else job.checkpoints.read_step


def after_steps(job: JobState) -> str:
    """The number of steps after which the job ends, in words, with its newest checkpoint and the steps that are
    lost. Of a job without a folder for checkpoints only the number."""
    text, lost, saved = f"after {counted(job.steps.progress.step, 'step')}", lost_steps(job), _saved_step(job)
    if lost and job.checkpoints.unmade is not None:
        text = f"{text}; the last checkpoint failed ({job.checkpoints.unmade.reason})"
    if saved:
        text = f"{text}; the newest checkpoint is of step {saved}"
    elif lost:
        text = f"{text}; it made no checkpoint"
    if not lost:
        return text
    return f"{text}: {counted(lost, 'step')} {'is' if lost == 1 else 'are'} lost"
