"""The newest checkpoint of a job, beside its newest step: which steps would be made again."""

from __future__ import annotations

from elasticd.machines.job.state.job_state import JobState
from elasticd.machines.job.state.snapshot_sets import Moment
from elasticd.records import PublishedCheckpoint


def newest(job: JobState) -> PublishedCheckpoint | None:
    """The newest checkpoint that the job published, of those that are a part of its history."""
    published = (one for one in job.published if not job.snapshots.dead(Moment(one.plan, one.step)))
    return max(published, key=lambda one: (one.plan, one.step), default=None)


def after_step(job: JobState) -> str:
    """The step after which the job ends, in words, with its newest checkpoint and the steps that are lost. Of a
    job without a folder for checkpoints only the step."""
    text, found = f"after step {job.progress.step}", newest(job)
    if found is None:
        saves = any(worker.saves_now for worker in job.workers.values())
        return f"{text}; it made no checkpoint" if saves and job.progress.step > 0 else text
    text = f"{text}; the newest checkpoint is of step {found.step}"
    lost = job.progress.step - found.step
    if lost <= 0:
        return text
    return f"{text}: {lost} steps are lost" if lost > 1 else f"{text}: 1 step is lost"
