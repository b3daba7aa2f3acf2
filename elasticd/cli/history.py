"""`elasticd history`: a job's plans, each with what it was predicted to take and why it was made."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from elasticd.cli.options import asking, json_option, plain_table, write_json
from elasticd.client import Api, CannotReach
from elasticd.records import HistoryRecord


@click.command()
@asking
@json_option("The whole records, each with the problem that it answers.")
@click.option("--last", type=click.IntRange(min=1), default=20, show_default=True, help="How many plans.")
@click.argument("job", required=False)
def history(api: Api, as_json: bool, last: int, job: str | None) -> None:
    """Show the plans of JOB, the newest last. Without JOB that of the only job."""
    found = api.history(job_named(api, job))[-last:]
    if as_json:
        write_json(found)
        return
    Console(highlight=False, markup=False).print(listed(found))


def listed(records: Sequence[HistoryRecord]) -> Table:
    """One line for each plan."""
    table = plain_table(">plan", ">step, predicted", ">devices", ">idle", "why")
    for record in records:
        plan = record.plan
        seconds = f"{plan.prediction.step_seconds:.3f} s" if plan.prediction is not None else "-"
        table.add_row(
            str(record.number), seconds, str(len(plan.members)), str(len(plan.idle) or ""), record.reason
        )
    return table


def job_named(api: Api, job: str | None) -> str:
    """The job that is meant. Raises `CannotReach` where there is none, or several and none was named."""
    names = [found.job for found in api.status().jobs]
    if job is not None and job in names:
        return job
    if job is None and len(names) == 1:
        return names[0]
    said = f"there is no job {job!r}" if job is not None else "name a job"
    raise CannotReach(f"{said}; there are: {', '.join(names) or 'none'}")
