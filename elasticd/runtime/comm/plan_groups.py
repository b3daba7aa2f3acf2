"""The fabrics of one rank by plan number, and the threads in which they are let go."""

from __future__ import annotations

import threading
import time

from elasticd.runtime.comm.groups import Fabric

#: Seconds that the end of a job waits for threads that let groups go.
_LEAVE = 5.0


class Fabrics:
    """Thread-safe, but for what is `spent`: that is the main thread's."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._fabrics: dict[int, list[Fabric]] = {}
        self._threads: list[threading.Thread] = []
        self._spent: list[Fabric] = []

    def add(self, number: int, fabric: Fabric) -> None:
        with self._lock:
            self._fabrics.setdefault(number, []).append(fabric)

    def remember(self, thread: threading.Thread) -> None:
        """A thread that the end of the job waits for."""
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def release(self, fabric: Fabric) -> None:
        """One fabric goes, whatever it was for."""
        with self._lock:
            left = {number: [f for f in listed if f is not fabric] for number, listed in self._fabrics.items()}
            self._fabrics = {number: listed for number, listed in left.items() if listed}
        self.remember(fabric.park())

    def spent(self, fabric: Fabric, *, now: bool) -> None:
        """A switch's own groups are not needed any more. They go with the next `release_spent`, after the first
        step, unless `now`: to let them go takes processor that the switch and that step are in want of."""
        self.release_spent()
        self._spent.append(fabric)
        if now:
            self.release_spent()

    def release_spent(self) -> None:
        while self._spent:
            self.release(self._spent.pop())

    def cancel(self, number: int) -> None:
        """Frees who waits in the fabrics of this number, and lets them go."""
        with self._lock:
            fabrics = self._fabrics.pop(number, [])
        _shut(fabrics)
        for fabric in fabrics:
            self.remember(fabric.park())

    def shut(self) -> None:
        """Frees every thread that waits in a group."""
        with self._lock:
            fabrics = [fabric for listed in self._fabrics.values() for fabric in listed]
        _shut(fabrics)

    def end(self) -> None:
        """Lets all groups go and waits for the threads that do so: an interpreter that ends while one of them
        is inside gloo aborts."""
        with self._lock:
            fabrics = [fabric for number in list(self._fabrics) for fabric in self._fabrics.pop(number)]
        _shut(fabrics)
        for fabric in fabrics:
            self.remember(fabric.park())
        deadline = time.monotonic() + _LEAVE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _shut(fabrics: list[Fabric]) -> None:
    """Who polls in any of them leaves at once, who waits for a message when it is shut."""
    for fabric in fabrics:
        fabric.dead = True
    for fabric in fabrics:
        fabric.shut()
