"""`elasticd logs`: what the leader told of the cluster and its jobs, and what it goes on to tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import click
import msgspec

from elasticd.backoff import Backoff
from elasticd.cli.options import cluster_options, json_option
from elasticd.client import Api, CannotReach, reach
from elasticd.coordinator.events.event_log import EVENTS_OF_A_TERM, EventRecord, line

_POLL = 0.5
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
    "--kind", "kinds", multiple=True, metavar="KIND", help="Only events of this kind; may be repeated."
)
@click.argument("job", required=False)
def logs(
    config: str | None,
    coordinator: str | None,
    as_json: bool,
    follow: bool,
    last: int,
    kinds: tuple[str, ...],
    job: str | None,
) -> None:
    """Show what happened, the newest last: in the whole cluster, or to JOB."""
    with reach(config, coordinator) as api:
        told = api.events()
        for event in _wanted(told, kinds, job)[-last:] if last else ():
            _write(event, as_json)
    if follow:
        for event in following(lambda: reach(config, coordinator), told[-1].id if told else 0):
            if _wanted((event,), kinds, job):
                _write(event, as_json)


def following(connect: Callable[[], AbstractContextManager[Api]], after: int) -> Iterator[EventRecord]:
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
                    time.sleep(_POLL)
        except CannotReach as error:
            if not away:
                click.echo(f"elasticd: {error}; waiting for a leader", err=True)
            away = True
            time.sleep(pause.next())


def _wanted(events: Iterable[EventRecord], kinds: tuple[str, ...], job: str | None) -> list[EventRecord]:
    return [event for event in events if (not kinds or event.kind in kinds) and job in (None, event.job)]


def _write(event: EventRecord, as_json: bool) -> None:
    click.echo(msgspec.json.encode(event) if as_json else line(event))
