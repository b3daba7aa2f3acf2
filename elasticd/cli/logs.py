"""`elasticd logs`: what the leader told of the cluster and its jobs, and what it goes on to tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import get_args

import click
import msgspec

from elasticd.backoff import Backoff
from elasticd.cli.job_argument import named_job, running_jobs
from elasticd.cli.options import cluster_options, json_option
from elasticd.cli.worker_output import show_output
from elasticd.client import ApiClient, CannotReach, reach
from elasticd.machines.job.state.events import EventKind
from elasticd.wire.api_types import ClusterStatus
from elasticd.wire.event_record import EVENTS_OF_A_TERM, EventRecord, line

_POLL_SECONDS = 0.5
#: Seconds between attempts to find a leader: doubled from the first to the second.
_AWAY = (0.2, 2.0)


@click.command()
@cluster_options
@json_option("One JSON line for each event.")
@click.option("--follow", "-f", is_flag=True, help="Go on until Ctrl-C.")
@click.option(
    "--last", type=click.IntRange(min=0), default=50, show_default=True, help="How many to begin with."
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    type=click.Choice(get_args(EventKind)),
    help="Only events of this kind; may be repeated.",
)
@click.option("--all", "everything", is_flag=True, help="Events of every job, those that are over included.")
@click.option(
    "--worker",
    metavar="NODE/I",
    help="What the worker of this device wrote, in place of events: as far as its agent keeps it.",
)
@click.argument("job", required=False)
def logs(
    config: str | None,
    coordinator: str | None,
    as_json: bool,
    follow: bool,
    last: int,
    kinds: tuple[str, ...],
    everything: bool,
    worker: str | None,
    job: str | None,
) -> None:
    """Show what happened, the newest last: to JOB, or to the job that runs, and to the cluster meanwhile.

    Where no job runs, or several do, and with --json, the events of all jobs are shown.
    """
    if worker is not None:
        if kinds or everything or as_json:
            raise click.UsageError("--worker shows what a worker wrote: leave --kind, --all and --json out")
        show_output(lambda: reach(config, coordinator), worker, job or "", last, follow=follow)
        return
    if everything and job is not None:
        raise click.UsageError("--all is of every job: leave JOB out")
    with reach(config, coordinator) as api:
        events = api.events()
        status = api.status()
        jobs = _jobs_meant(status, job, as_json=as_json) if not everything else None
        if job is not None and not follow and not any(event.job == job for event in events):
            named_job(status, job)
        for event in _wanted(events, kinds, jobs)[-last:] if last else ():
            _write(event, as_json)
    if follow:
        for event in following(lambda: reach(config, coordinator, 0.0), events[-1].id if events else 0):
            if _wanted((event,), kinds, jobs):
                _write(event, as_json)


def _jobs_meant(status: ClusterStatus, job: str | None, *, as_json: bool) -> tuple[str, ...] | None:
    """The jobs whose events are shown, "" for those of the cluster; None for all. A line on standard error
    tells people where none was named; programs get all."""
    if job is not None:
        return (job,)
    running = running_jobs(status)
    if as_json or not running:
        return None
    if len(running) > 1:
        named = ", ".join(running)
        click.echo(f"{len(running)} jobs run: {named}; 'elasticd logs JOB' shows one of them", err=True)
        return None
    click.echo(f"job {running[0]}, the one that runs, and the cluster; --all shows every job", err=True)
    return ("", *running)


def following(connect: Callable[[], AbstractContextManager[ApiClient]], after: int) -> Iterator[EventRecord]:
    """Events as they come, without end, from one leader after the other. Where none answers, standard error
    says so once, and the next one is waited for."""
    pause = Backoff(*_AWAY)
    away = False
    while True:
        try:
            with connect() as api:
                newest = max((event.id for event in api.events()), default=after)
                if newest < EVENTS_OF_A_TERM <= after:
                    after = 0  # a leader of release 0.1, whose ids begin at 1
                while True:
                    for event in api.events(after):
                        after = event.id
                        yield event
                    away = False
                    pause.reset()
                    time.sleep(_POLL_SECONDS)
        except CannotReach as error:
            if not away:
                click.echo(f"elasticd: {error}; waiting for a leader", err=True)
            away = True
            time.sleep(pause.next())


def _wanted(
    events: Iterable[EventRecord], kinds: tuple[str, ...], jobs: tuple[str, ...] | None
) -> list[EventRecord]:
    return [
        event for event in events if (not kinds or event.kind in kinds) and (jobs is None or event.job in jobs)
    ]


def _write(event: EventRecord, as_json: bool) -> None:
    click.echo(msgspec.json.encode(event) if as_json else line(event))
