"""Sessions of processes: torchrun's worker leads one, and what it starts is in it, unless put into another.

Children of a worker that outlive it stay in that session, whoever is their parent then; and the kernel gives
the session's number to no other process as long as one is left in it. A child that was put into a session of
its own (a daemon, a service that uploads metrics) was told so to go on by itself, and is no part of it.
Standard library only: a torchrun imports this.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Seconds from SIGTERM to SIGKILL for the processes that a dead worker left.
GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Process:
    """A living process."""

    pid: int  # its number
    parent: int  # the number of its parent
    session: int  # the number of its session, which is that of the process that leads it


def led_by_children(parent: int) -> set[int]:
    """The sessions that living children of a process lead."""
    return {each.pid for each in _processes() if each.parent == parent and each.session == each.pid}


def is_led(session: int) -> bool:
    """Returns True if the process that leads a session, and gave it its number, lives."""
    leader = _process(session)
    return leader is not None and leader.session == session


def members(sessions: Collection[int]) -> set[int]:
    """The numbers of the living processes in these sessions."""
    return {each.pid for each in _processes() if each.session in sessions} if sessions else set()


def end(sessions: Collection[int], grace_seconds: float = GRACE_SECONDS) -> set[int]:
    """Ends the processes in these sessions by SIGTERM, and by SIGKILL those that live `grace_seconds` later (0:
    all by SIGKILL at once). Returns their numbers."""
    with contextlib.ExitStack() as descriptors:
        ended: dict[int, int] = {}
        for pid in members(sessions):
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                descriptors.callback(os.close, descriptor)
                again = _process(pid)  # the number may be another process' by now
                if again is not None and again.session in sessions:
                    ended[pid] = descriptor
        if grace_seconds > 0:
            _signal(ended.values(), signal.SIGTERM)
            _await(ended.values(), grace_seconds)
        _signal(ended.values(), signal.SIGKILL)
        return set(ended)


def _signal(descriptors: Collection[int], number: signal.Signals) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)


def _await(descriptors: Collection[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    waiting = select.poll()
    left = set(descriptors)
    for descriptor in left:
        waiting.register(descriptor, select.POLLIN)
    while left and (rest := deadline - time.monotonic()) > 0:
        for descriptor, _ in waiting.poll(rest * 1000):
            waiting.unregister(descriptor)
            left.discard(descriptor)


def _processes() -> Iterator[Process]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (process := _process(int(entry.name))) is not None:
            yield process


def _process(pid: int) -> Process | None:
    """None for one that has ended, or only waits for its parent to look."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in ("Z", "X"):
        return None
    return Process(pid, int(fields[1]), int(fields[3]))
