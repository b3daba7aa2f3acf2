"""`elasticd simulate --recorded`: a run decided again, beside what was decided then."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.text import Text

from elasticd.cli.console import command_console
from elasticd.cli.options import plain_table
from elasticd.config.tree import load

if TYPE_CHECKING:
    from elasticd.recording import Line
    from elasticd.simulator.replay import Replayed

#: Characters of one decision on the screen.
_MOST_TEXT = 160


def again(recorded: str, config: str | None, as_json: bool) -> None:
    """Decides a recording again, by the settings of `config` where one is named; says whether that differs."""
    from elasticd.simulator.planning import Planner
    from elasticd.simulator.replay import replay
    from elasticd.simulator.scenarios.scenario import Times

    lines = lines_of(recorded)
    settings = load(config) if config is not None else None
    try:
        replayed = replay(
            lines,
            Planner(Times()),
            detect=settings.detect if settings is not None else None,
            policy=settings.policy if settings is not None else None,
        )
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{recorded} was made by another release of elasticd: {error}") from None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(replayed), indent=1))
    else:
        show(replayed, command_console())
    if config is None and replayed.differs is not None:
        raise click.ClickException(
            "by the same settings something else was decided: the recording is of another release, or has a gap"
        )


def lines_of(recorded: str) -> list[Line]:
    """The lines of a recording. Raises click.ClickException."""
    from elasticd.recording import read

    path = Path(recorded)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as text:
            return read(text, recorded)
    except (OSError, EOFError, zlib.error) as error:
        raise click.ClickException(f"cannot read the recording {recorded}: {error}") from error


def show(found: Replayed, console: Console) -> None:
    """The decisions, and where they part from those of the recording."""
    table = plain_table(">seconds", "what", "")
    for index, decision in enumerate(found.decisions):
        style = "yellow" if found.differs is not None and index >= found.differs else ""
        text = f"{decision.job}: {decision.text}" if decision.job else decision.text
        row = (
            f"{decision.seconds:,.1f}",
            decision.kind,
            Text(shorten(text, _MOST_TEXT, placeholder=" ..."), style),
        )
        table.add_row(*row)
    console.print(table)
    console.print(f"{found.events} events, up to step {found.step}")
    if found.differs is None:
        console.print(f"the same decisions as recorded: {len(found.decisions)}")
        return
    was = found.recorded[found.differs] if found.differs < len(found.recorded) else None
    then = f"{was.kind} at {was.seconds:,.1f} s: {was.text}" if was is not None else "nothing more"
    console.print(
        f"differs from decision {found.differs + 1} on; recorded was: {shorten(then, 3 * _MOST_TEXT)}"
    )
    if found.ended:
        console.print(found.ended)
