"""Workers of a torchrun that is gone: nobody would end them, and they would keep their devices.

A torchrun in restart mode marks its environment, which its workers inherit, and theirs after them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from elasticd.packets import TORCHRUN_VARIABLE


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or only waits for its parent to look."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return fields.rpartition(")")[2].split()[0] in ("Z", "X")


def end(torchrun: str) -> list[int]:
    """Kills all that the torchrun of this name left behind; their process ids."""
    ended = []
    for pid in _marked(torchrun):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # By a descriptor, and looked at again, so that the number cannot be another process' by now.
            fd = os.pidfd_open(pid)
            try:
                if _is_marked(pid, torchrun):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    ended.append(pid)
            finally:
                os.close(fd)
    return ended


def _marked(torchrun: str) -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and _is_marked(int(entry.name), torchrun):
            yield int(entry.name)


def _is_marked(pid: int, torchrun: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{TORCHRUN_VARIABLE}={torchrun}".encode() in environment.split(b"\0")
