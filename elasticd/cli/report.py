"""`elasticd report`: the dashboard's pages of a job with all their values, in one file."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import click

from elasticd.cli.options import cluster_options
from elasticd.client import Api, reach
from elasticd.local_cluster import settings as settings_of


@click.command()
@cluster_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="The HTML to write.",
)
@click.option(
    "--history",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A dashboard's history (default: that of this cluster's dashboard on this machine).",
)
@click.argument("job")
def report(config: str | None, coordinator: str | None, out: Path, history: Path | None, job: str) -> None:
    """Write all that is known of JOB into one HTML FILE, which opens from disk without a network.

    It has the pages of the dashboard: throughput with plans and faults, each plan and why, switches, devices,
    events. They come from the dashboard's history, and from whoever leads now, where somebody does.
    """
    from elasticd.dashboard.daemon import history_path
    from elasticd.dashboard.report import NoReport, report_values
    from elasticd.dashboard.single_file import single_file

    settings = settings_of(config)

    def connect() -> AbstractContextManager[Api]:
        return reach(config, coordinator)

    try:
        values = report_values(job, history or history_path(settings), connect, settings.dashboard)
        text = single_file(values, f"{job}, a report of elasticd")
        out.write_text(text, encoding="utf-8")
    except NoReport as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror or error}") from None
    plans = sum("/plans/" in path for path in values)
    click.echo(f"{out}: {len(text) / 2**20:.1f} MiB, {plans} plans; open it in a browser")
