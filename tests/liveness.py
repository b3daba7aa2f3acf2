"""Which processes live, asked while they end: psutil raises for one that is reaped between two questions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def ended(process: psutil.Process) -> bool:
    """Whether it is gone, or a zombie that its parent has not collected yet."""
    return not living([process])


def living(processes: Iterable[psutil.Process], what: str = "", *, unnamed: str = "") -> list[psutil.Process]:
    """Those that live, have `what` in their command line, and are not called `unnamed`."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if what in " ".join(process.cmdline()) and process.name() != unnamed:
                found.append(process)
    return found
