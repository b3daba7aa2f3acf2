"""`elasticd report`: the dashboard's pages of a job with all their values, in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from elasticd.cli.job_argument import job_with_plans
from elasticd.cli.options import cluster_options
from elasticd.client import ApiClient, CannotReach, reach
from elasticd.local_cluster import settings as settings_of

if TYPE_CHECKING:
    from elasticd.dashboard.board import Board
    from elasticd.dashboard.report import Connect


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
@click.option(
    "--recorded",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A recording of 'elasticd record', in place of a history; no cluster is asked.",
)
@click.argument("job", required=False)
def report(
    config: str | None,
    coordinator: str | None,
    out: Path,
    history: Path | None,
    recorded: Path | None,
    job: str | None,
) -> None:
    """Write all that is known of JOB into one HTML FILE, which opens from disk without a network.

    Without JOB it is the one that runs; a recording needs the name.

    It has the pages of the dashboard: throughput with plans and faults, each plan and why, switches, devices,
    events. They come from the dashboard's history and from whoever leads now, where somebody does; or from a
    recording.
    """
    from elasticd.dashboard.report import NoReport, report_values
    from elasticd.dashboard.single_file import single_file

    if recorded is not None and (history is not None or coordinator is not None):
        raise click.UsageError("--recorded is a run by itself: leave --history and --coordinator out")
    if job is None:
        if recorded is not None:
            raise click.UsageError("name the JOB of the recording")
        with reach(config, coordinator) as api:
            job = job_with_plans(api.status(), None, quiet=False)
    try:
        if recorded is not None:
            values = report_values(job, _of_recording(recorded), _nobody)
        else:
            values = report_values(job, *_of_cluster(config, coordinator, history))
        text = single_file(values, f"{job}, a report of elasticd")
        out.write_text(text, encoding="utf-8")
    except NoReport as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror or error}") from None
    plans = sum("/plans/" in path for path in values)
    click.echo(f"{out}: {len(text) / 2**20:.1f} MiB, {plans} plans; open it in a browser")


def _of_cluster(
    config: str | None, coordinator: str | None, history: Path | None
) -> tuple[Callable[[Path], Board], Connect]:
    from elasticd.dashboard.daemon import history_path
    from elasticd.dashboard.report import of_history

    settings = settings_of(config)

    def connect() -> AbstractContextManager[ApiClient]:
        return reach(config, coordinator)

    return of_history(history or history_path(settings), connect, settings.dashboard), connect


def _of_recording(file: Path) -> Callable[[Path], Board]:
    from elasticd.cli.recorded_history import RecordedRun, name_of
    from elasticd.cli.replay import lines_of
    from elasticd.dashboard.board import Board
    from elasticd.dashboard.history import opened
    from elasticd.dashboard.report import NoReport
    from elasticd.dashboard.stream import Streams
    from elasticd.dashboard.subscription import Told

    def filled(copy: Path) -> Board:
        lines = lines_of(str(file))
        writer = opened(copy)
        try:
            run = RecordedRun(writer)
            run.take(lines)
        except msgspec.DecodeError as error:
            raise NoReport(f"{file} was made by another release of elasticd: {error}") from None
        finally:
            writer.close()
        board = Board(Streams(0))
        for news in run.at_its_end(name_of(file)):
            board.hear(Told(at=lines[-1].time, news=news))
        board.known.lost("the recording ends here", lines[-1].time)
        return board

    return filled


@contextmanager
def _nobody() -> Iterator[ApiClient]:
    raise CannotReach("a recording has no leader")
    yield
