"""`elasticd logs --worker`: what a worker wrote, and what it goes on to write."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import click

from elasticd.backoff import Backoff
from elasticd.client import ApiClient, CannotReach
from elasticd.codec.safe_text import for_terminal

#: Bytes of all that is kept of a worker, or more.
_ALL_BYTES = 1 << 30
_POLL_SECONDS = 0.5
#: Seconds between attempts to find a leader: doubled from the first to the second.
_AWAY = (0.2, 5.0)
#: What colours text in a terminal, or moves its cursor.
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")


class OutputLines:
    """Output in parts, as lines for people: of a progress bar its last state, and nothing that a terminal
    obeys."""

    def __init__(self) -> None:
        self._waits = ""

    def take(self, text: str) -> list[str]:
        """The lines that are complete now."""
        *lines, self._waits = (self._waits + text).split("\n")
        return [_shown(line) for line in lines]

    def rest(self) -> str:
        """The line that has no end yet."""
        waits, self._waits = self._waits, ""
        return _shown(waits)


def show_output(
    connect: Callable[[], AbstractContextManager[ApiClient]], device: str, job: str, last: int, *, follow: bool
) -> None:
    """Prints the `last` lines of a worker's output that are kept; follow: and those that come, until Ctrl-C.
    Raises CannotReach."""
    if not device.rpartition("/")[0]:
        raise click.BadParameter(f"--worker {device} must name a device as 'elasticd status' does, as alpha/1")
    lines, shown = OutputLines(), list[str]()
    with connect() as api:
        part = api.output(device, job, -_ALL_BYTES)
        job = part.job  # which later starts of another one do not take the place of
        while part.begin < part.end:
            shown += lines.take(part.text)
            part = api.output(device, job, part.end)
    rest = [] if follow else [lines.rest()]
    for line in [*shown, *filter(None, rest)][-last:] if last else ():
        click.echo(line)
    if follow:
        _follow(connect, device, job, part.end, lines)


def _follow(
    connect: Callable[[], AbstractContextManager[ApiClient]],
    device: str,
    job: str,
    after: int,
    lines: OutputLines,
) -> None:
    pause, away = Backoff(*_AWAY), False
    while True:
        try:
            with connect() as api:
                while True:
                    part = api.output(device, job, after)
                    if part.begin > after:
                        click.echo(f"elasticd: {part.begin - after} bytes were overwritten before", err=True)
                    for line in lines.take(part.text):
                        click.echo(line)
                    if part.begin == part.end:
                        time.sleep(_POLL_SECONDS)
                    after, away = part.end, False
                    pause.reset()
        except CannotReach as error:
            if not away:
                click.echo(f"elasticd: {error}; trying again", err=True)
            away = True
            time.sleep(pause.next())


def _shown(line: str) -> str:
    return for_terminal(_ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2])
