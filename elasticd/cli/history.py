"""`elasticd history`: a job's plans, each with what it was predicted to take and why it was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec
from elasticd_planner.readable import readable_seconds
from rich.table import Table

from elasticd.cli.console import command_console
from elasticd.cli.job_argument import job_with_plans
from elasticd.cli.options import asking, json_option, plain_table, write_json
from elasticd.client import ApiClient
from elasticd.explain.why import prediction_of
from elasticd.records import AnyHistoryRecord
from elasticd.wire.event_record import EventRecord


@click.command()
@asking
@json_option("The whole records, each with the problem that it answers and what a step is predicted to take.")
@click.option("--last", type=click.IntRange(min=1), default=20, show_default=True, help="How many plans.")
@click.argument("job", required=False)
def history(api: ApiClient, as_json: bool, last: int, job: str | None) -> None:
    """Show the plans of JOB (default: the one that runs), the newest last.

    What a step takes is as the newest profile of the model predicts it. One with a "?" is a guess by the
    model's shapes: no step had been measured.
    """
    name = job_with_plans(api.status(), job, quiet=as_json)
    records = api.history(name)[-last:]
    events = [event for event in api.events() if event.job == name]
    if as_json:
        write_json([told_of(record, events) for record in records])
        return
    command_console().print(listed(records, events))


def told_of(record: AnyHistoryRecord, told: Sequence[EventRecord]) -> dict[str, Any]:
    """A plan for programs."""
    predicted = prediction_of(record, told)
    about = {"predicted_seconds": predicted.seconds, "guessed": predicted.guessed}
    return {**msgspec.to_builtins(record), **about}


def listed(records: Sequence[AnyHistoryRecord], told: Sequence[EventRecord] = ()) -> Table:
    """One line for each plan; `told` are the events of its job, by which a step may be predicted anew."""
    table = plain_table(">plan", ">step, predicted", ">devices", ">idle", "why")
    for record in records:
        plan = record.plan
        predicted = prediction_of(record, told)
        seconds = "-" if predicted.seconds is None else readable_seconds(predicted.seconds)
        seconds += " ?" * predicted.guessed
        table.add_row(
            str(record.number), seconds, str(len(plan.members)), str(len(plan.idle) or ""), record.reason
        )
    return table
