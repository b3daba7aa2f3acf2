"""The job that a command is about: the one that is named, or else the one that runs."""

from __future__ import annotations

import click

from elasticd.client import CannotReach
from elasticd.wire.api_types import ClusterStatus, RestartStatus


def running_jobs(status: ClusterStatus) -> list[str]:
    """The names of the jobs that are not over, those in restart mode last."""
    live = [job.job for job in status.jobs if not job.over]
    return live + [job.job for job in status.restarts if job.job not in live and not job.over]


def job_names(status: ClusterStatus) -> list[str]:
    """The names of all jobs: first those that run, then those that are over."""
    running = running_jobs(status)
    return list(
        dict.fromkeys([*running, *(job.job for job in status.jobs), *(job.job for job in status.restarts)])
    )


def named_job(status: ClusterStatus, job: str) -> str:
    """`job`, which is there. Raises CannotReach with the names of those that are."""
    if job not in (names := job_names(status)):
        raise CannotReach(f"there is no job {job!r}; there are: {', '.join(names) or 'none'}")
    return job


def in_restart_mode(status: ClusterStatus, job: str | None) -> RestartStatus | None:
    """The job in restart mode that a command is about.

    Args:
        status: the cluster's.
        job: the name that the user gave. None: the one job that runs.

    Returns:
        None where the job has plans, or none is meant so.
    """
    running = running_jobs(status)
    name = job if job is not None else (running[0] if len(running) == 1 else None)
    if name is None or name in [other.job for other in status.jobs if job is not None or not other.over]:
        return None
    return next((other for other in status.restarts if other.job == name), None)


def job_with_plans(status: ClusterStatus, job: str | None, *, quiet: bool) -> str:
    """The job whose plans a command shows.

    Args:
        status: the cluster's.
        job: the name that the user gave. None: the one job that runs, or the only one where all are over.
        quiet: write no line to standard error that names the job that was chosen.

    Raises:
        CannotReach: there is no such job, several run and none is named, or the job is in restart mode.
    """
    planned = [found.job for found in status.jobs]
    if job is not None:
        named_job(status, job)
    else:
        running = [name for name in running_jobs(status) if name in planned]
        job = _only(running or planned, running=bool(running))
        if not quiet:
            click.echo(f"job {job}, {'the one that runs' if running else 'the only one'}", err=True)
    if job not in planned:
        raise CannotReach(
            f"job {job} is in restart mode, which has no plans: 'elasticd status {job}' shows its processes"
        )
    return job


def _only(names: list[str], *, running: bool) -> str:
    if len(names) == 1:
        return names[0]
    if not names:
        raise CannotReach("there is no job: start one with elasticd run SCRIPT")
    how = "run" if running else "are over and none runs"
    raise CannotReach(f"{len(names)} jobs {how}: name one of {', '.join(names)}")
