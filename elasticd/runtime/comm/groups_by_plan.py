"""The process groups of one rank by plan number, and the threads in which they are let go."""

from __future__ import annotations

import threading
import time

from elasticd.runtime.comm.groups import PlanGroups, shut

#: Seconds that the end of a job waits for threads that let groups go.
_LEAVE_SECONDS = 5.0


class GroupsByPlan:
    """All `PlanGroups` of one rank. Thread-safe, except for `spent` and `release_spent`, which the main thread
    calls."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers: dict[PlanGroups, int] = {}
        self._threads: list[threading.Thread] = []
        self._spent: list[PlanGroups] = []

    def add(self, number: int, groups: PlanGroups) -> None:
        """Keeps groups that were made for plan `number`."""
        with self._lock:
            self._numbers[groups] = number

    def remember(self, thread: threading.Thread) -> None:
        """Has the end of the job wait for a thread."""
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def release(self, groups: PlanGroups) -> None:
        """Lets the groups of one plan or transition go."""
        with self._lock:
            self._numbers.pop(groups, None)
        self.remember(groups.park())

    def spent(self, groups: PlanGroups, *, now: bool) -> None:
        """Lets the groups of a finished switch go, at the next `release_spent`.

        Args:
            groups: the groups of the transition.
            now: at once. Otherwise after the first step, because letting them go takes processor time from the
                switch and that step.
        """
        self.release_spent()
        self._spent.append(groups)
        if now:
            self.release_spent()

    def release_spent(self) -> None:
        """Lets go what is `spent`."""
        while self._spent:
            self.release(self._spent.pop())

    def cancel(self, number: int) -> None:
        """Frees the threads that wait in groups of this number, and lets those groups go."""
        with self._lock:
            listed = [groups for groups, its in self._numbers.items() if its == number]
        self._let_go(listed)

    def shut(self) -> None:
        """Frees every thread that waits in a group."""
        with self._lock:
            listed = list(self._numbers)
        shut(listed)

    def end(self) -> None:
        """Lets all groups go and waits for the threads that do so, 5 s at most. An interpreter that ends while
        one of them is inside gloo aborts."""
        with self._lock:
            listed = list(self._numbers)
        self._let_go(listed)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _let_go(self, listed: list[PlanGroups]) -> None:
        shut(listed)
        for groups in listed:
            self.release(groups)
