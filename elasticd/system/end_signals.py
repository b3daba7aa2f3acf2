"""Signals that ask a program to end: noted, and looked at where that is safe, instead of ending it anywhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Ctrl-C, the request of another process, and a closed terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def noted() -> Iterator[list[int]]:
    """The signals that came since, a list that grows. Once one has come, later ones are ignored at the end: an
    impatient user's next Ctrl-C must not break a clean-up off. Used from the main thread."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)  # no lock here: this runs in the midst of anything

    before = {number: signal.signal(number, note) for number in ENDING}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if told else handler)
