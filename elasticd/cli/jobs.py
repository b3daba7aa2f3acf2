"""`elasticd jobs`, `stop`, `adopt` and `forget`: the jobs in a line each, the end of one, and what is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping

import click
from elasticd_planner.readable import counted
from rich.table import Table

from elasticd.cli.console import command_console
from elasticd.cli.options import asking, json_option, plain_table, write_json
from elasticd.client import ApiClient, CannotReach, asker
from elasticd.codec.safe_text import in_one_line
from elasticd.wire.api_types import ClusterStatus, JobStatus, RestartStatus

#: Seconds beyond those that the job has, until its end is known to whoever asks.
_MARGIN_SECONDS = 10.0
_POLL_SECONDS = 0.5


@click.command()
@asking
@json_option("The status of each job.")
def jobs(api: ApiClient, as_json: bool) -> None:
    """Show each job in a line: its phase, step, loss, speed and plan; those that are over last."""
    cluster = api.status()
    if as_json:
        write_json({"jobs": cluster.jobs, "restarts": cluster.restarts})
        return
    if not cluster.jobs and not cluster.restarts:
        click.echo("no job: start one with elasticd run SCRIPT")
        return
    command_console().print(listed(cluster))


def listed(found: ClusterStatus) -> Table:
    """One line for each job: those that run, those in restart mode, and those that are over."""
    table = plain_table("job", "phase", ">step", ">loss", ">tokens/s", ">plan", ">devices", "", whole=2)
    for job in found.jobs:
        if not job.over:
            table.add_row(*_row(job))
    for over in (False, True):
        for restarting in found.restarts:
            if restarting.over == over:
                table.add_row(*_restart_row(restarting))
        for job in found.jobs:
            if job.over and over:
                table.add_row(*_row(job))
    return table


def _restart_row(job: RestartStatus) -> tuple[str, ...]:
    count = str(job.workers or len(job.devices))
    phase = "restart mode" if job.phase == "running" else f"restart mode, {job.phase}"
    step = str(job.step) if job.step else "-"
    return job.job, phase, step, "-", "-", "-", count, in_one_line(job.sentence)


def _row(job: JobStatus) -> tuple[str, ...]:
    loss = "-" if job.loss is None else f"{job.loss:.4f}"
    speed = "-" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f}"
    plan = ("-", "-") if job.plan is None else (str(job.plan.number), str(len(job.plan.members)))
    return job.job, job.shown_phase, str(job.step), loss, speed, *plan, in_one_line(job.reason)


@click.command()
@asking
@click.option("--now", is_flag=True, help="End it at once, without a last checkpoint.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0, min_open=True, max=86_400),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time for the last checkpoint; the job ends then in any case.",
)
@click.argument("job")
def stop(api: ApiClient, now: bool, wait: float, job: str) -> None:
    """End JOB, and wait until it has ended.

    Its workers get SIGTERM from their agents. They make a last checkpoint, if the job has a folder for it, and
    leave. The job's command starts it again, from its newest checkpoint. Meanwhile a line says what the job
    waits for, whenever that changes.
    """
    if unheard := api.stop(job, 0.0 if now else wait, by=asker()):
        click.echo(_unheard(unheard, job, wait), err=True)
    ended = _ended(api, job, 0.0 if now else wait)
    how = ended.reason or f"after {counted(ended.step, 'step')}"
    line = f"job {job} is {ended.phase}: {how}"
    says_outcome = ended.stopping is not None  # by a leader that also says whether something failed
    if says_outcome and not now and ended.phase == "stopped" and not ended.orderly:
        raise click.ClickException(line)
    click.echo(line)


@click.command()
@asking
@click.argument("job")
def adopt(api: ApiClient, job: str) -> None:
    """Take up JOB, whose workers run a plan that etcd lacks.

    That is so after etcd was lost and set up anew. Workers train on meanwhile, and nothing is decided for them.
    This command writes the plan that they run to etcd; faults are handled again from then on.
    """
    api.adopt(job, by=asker())
    click.echo(f"job {job} is adopted: its plan is in etcd again")


@click.command()
@asking
@click.option("--node", metavar="NAME", help="A node that is away and will not come back, in place of JOB.")
@click.argument("job", required=False)
def forget(api: ApiClient, node: str | None, job: str | None) -> None:
    """Delete all that the cluster keeps of JOB, which is over, or show a node no more.

    That is its plans and their history, and its snapshots in the agents' memory. Checkpoints on disk stay. The
    name can be used again. Without this command a job is forgotten a week after its end (keep_days in section
    [coordinator]).
    """
    if (job is None) == (node is None):
        raise click.UsageError("name a job, or a node by --node NAME")
    if node is not None:
        api.forget_node(node, by=asker())
        click.echo(f"node {node} is forgotten; it is there again once its agent comes back")
        return
    assert job is not None
    api.forget(job, by=asker())
    click.echo(f"job {job} is forgotten")


def _unheard(nodes: Mapping[str, str], job: str, seconds: float) -> str:
    """The sentence about nodes whose workers do not drain."""
    names = ", ".join(f"{name} (elasticd {release})" for name, release in sorted(nodes.items()))
    return (
        f"the agents of these nodes cannot tell their workers to go: {names}. The workers there train on until "
        f"the time is up ({seconds:g} s): send them SIGTERM yourself, or end the job without a last checkpoint "
        f"by 'elasticd stop --now {job}'"
    )


def _ended(api: ApiClient, job: str, seconds: float) -> JobStatus | RestartStatus:
    """The job once it is over, `seconds` from now and a margin at most. Says what it waits for; a leader that
    has not heard of the wish, since it just came, is asked as well. Raises `CannotReach` where it takes too
    long."""
    ends_at, shown = time.monotonic() + seconds, ""
    while True:
        status = api.status()
        job_status = status.job(job) or next((one for one in status.restarts if one.job == job), None)
        if job_status is None:
            raise CannotReach(f"job {job} is gone: another coordinator leads, which does not know it")
        if job_status.over:
            return job_status
        left = ends_at - time.monotonic()
        if left <= -_MARGIN_SECONDS:
            raise CannotReach(
                f"job {job} is {job_status.phase} still: 'elasticd status' says what it waits for, and "
                f"'elasticd stop --now {job}' ends it without a checkpoint"
            )
        if job_status.stopping is False and left > 0:
            api.stop(job, left, by=asker())
        elif job_status.reason and job_status.reason != shown:
            shown = job_status.reason
            click.echo(f"job {job}: {in_one_line(shown)}", err=True)
        time.sleep(_POLL_SECONDS)
