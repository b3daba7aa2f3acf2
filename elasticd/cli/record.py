"""`elasticd record`: keeps all that the leader hears and decides, for `elasticd simulate --recorded`."""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import IO, cast

import click

from elasticd.backoff import jittered
from elasticd.cli.console import command_console
from elasticd.cli.options import cluster_options
from elasticd.client import CannotReach, reach

#: Seconds in which another leader must be found after one is gone, and between attempts.
LEADER_TIMEOUT_SECONDS, RETRY_SECONDS = 60.0, 0.5


@click.command()
@cluster_options
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), help="Until then; default: until Ctrl-C."
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def record(config: str | None, coordinator: str | None, seconds: float | None, file: Path) -> None:
    """Record a run into FILE (compressed where it ends in .gz), from now on.

    The file holds the leader's state, with the plans in force and why, then everything that it hears: each
    step's measurements of each device, and what it decides from them. Follows the next leader where one takes
    over.
    """
    ends = time.monotonic() + seconds if seconds is not None else None
    console = command_console(stderr=True)
    try:
        kept = _opened(file)
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror}") from error
    with kept:
        lines = 0
        console.print(f"recording into {file}, until Ctrl-C" if ends is None else f"recording into {file}")
        try:
            lines = _keep(kept, config, coordinator, ends)
        except KeyboardInterrupt:
            console.print("ended")
            return
    console.print(f"{lines} lines")


def _opened(file: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(file, "wb")) if file.suffix == ".gz" else file.open("wb")


def _keep(kept: IO[bytes], config: str | None, coordinator: str | None, ends: float | None) -> int:
    """Writes until `ends`, from one leader after the other. Returns the lines. Raises CannotReach."""
    lines, lost = 0, None
    while ends is None or time.monotonic() < ends:
        try:
            with reach(config, coordinator, 0.0) as api:
                for line in api.recording():
                    lost = None
                    if line:
                        kept.write(line + b"\n")
                        lines += 1
                    if ends is not None and time.monotonic() >= ends:
                        return lines
        except CannotReach:
            if lines == 0 or (lost is not None and time.monotonic() - lost > LEADER_TIMEOUT_SECONDS):
                raise
        lost = lost or time.monotonic()
        time.sleep(jittered(RETRY_SECONDS))
    return lines
