"""`elasticd history`: a job's plans, each with what it was predicted to take and why it was made."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.table import Table

from elasticd.cli.console import command_console
from elasticd.cli.job_argument import job_with_plans
from elasticd.cli.options import asking, json_option, plain_table, write_json
from elasticd.client import Api
from elasticd.records import HistoryRecord


@click.command()
@asking
@json_option("The whole records, each with the problem that it answers.")
@click.option("--last", type=click.IntRange(min=1), default=20, show_default=True, help="How many plans.")
@click.argument("job", required=False)
def history(api: Api, as_json: bool, last: int, job: str | None) -> None:
    """Show the plans of JOB (default: the one that runs), the newest last."""
    found = api.history(job_with_plans(api.status(), job, quiet=as_json))[-last:]
    if as_json:
        write_json(found)
        return
    command_console().print(listed(found))


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
