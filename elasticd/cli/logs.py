"""`elasticd logs`: what the leader told of the cluster and its jobs, and what it goes on to tell."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

import click
import msgspec

from elasticd.cli.options import config_option, coordinator_option, json_option
from elasticd.cli.reach import Api, reach
from elasticd.coordinator.journal import EventRecord
from elasticd.plain import in_one_line

_POLL = 0.5


@click.command()
@config_option
@coordinator_option
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
            for event in following(api, told[-1].id if told else 0):
                if _wanted((event,), kinds, job):
                    _write(event, as_json)


def following(api: Api, after: int) -> Iterator[EventRecord]:
    """Events as they come, without end."""
    while True:
        for event in api.events(after):
            after = event.id
            yield event
        time.sleep(_POLL)


def _wanted(events: Iterable[EventRecord], kinds: tuple[str, ...], job: str | None) -> list[EventRecord]:
    return [event for event in events if (not kinds or event.kind in kinds) and job in (None, event.job)]


def _write(event: EventRecord, as_json: bool) -> None:
    sys.stdout.write((msgspec.json.encode(event).decode() if as_json else line(event)) + "\n")
    sys.stdout.flush()


def line(event: EventRecord) -> str:
    """An event for people: local time, kind, job, text."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    about = f"{event.job}: " if event.job else ""
    return in_one_line(f"{clock}  {event.kind:<15} {about}{event.text}")
