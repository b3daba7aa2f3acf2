"""What this process holds open, to be compared with what it held before: nothing new is left where
`open_descriptors() <= before`. What others let go meanwhile (an earlier test's thread, the garbage collector)
does not count."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_descriptors() -> frozenset[tuple[int, str]]:
    """The number of each and what it is: sockets and pipes have one that no other has."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or one that was just closed
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return frozenset(found)


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """This process may open so many more meanwhile, and those below its highest that are free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
