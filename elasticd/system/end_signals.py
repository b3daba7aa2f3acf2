"""Signals that ask a program to end: noted, and looked at where that is safe, instead of ending it anywhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

#: Ctrl-C, the request of another process, and a closed terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: By these a training job is told that its processes will end; schedulers send the last two some time before.
NOTICES = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def noted(numbers: tuple[signal.Signals, ...] = ENDING) -> Iterator[list[int]]:
    """The signals that came since, a list that grows. Once one has come, later ones are ignored at the end: an
    impatient user's next Ctrl-C must not break a clean-up off. SIGHUP stays ignored where it is, as `nohup` has
    it. Used from the main thread."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)  # no lock here: this runs in the midst of anything

    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {
        number: signal.signal(number, note) for number in numbers if not (nohup and number is signal.SIGHUP)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if signals else handler)


def caught(pid: int, number: signal.Signals) -> bool:
    """Returns True if a process has a handler for a signal, be it one in C. False where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = (line.partition(":")[2] for line in status.splitlines() if line.startswith("SigCgt:"))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
