"""A token bucket: how many bytes one node's processes may have written to etcd.

etcd keeps every version of a value until its next compaction. A process that sets a key again and again would
fill it, and a full etcd takes writes from nobody.
"""

from __future__ import annotations


class Allowance:
    """`burst` bytes at once, and `rate` bytes more for each second since. All is asked with monotonic seconds.
    Where the size is known before it is written, `take` asks; where it is not, `spend` counts, and `wait` tells
    how long whoever is the cause is not to be heard."""

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._left, self._at = burst, 0.0

    def take(self, size: int, now: float) -> bool:
        """Returns True if `size` bytes may be written now; if so, they are counted."""
        self._pass(now)
        if size > self._left:
            return False
        self._left -= size
        return True

    def spend(self, size: int, now: float) -> None:
        """Counts bytes that were written already. What is owed is never more than `burst`."""
        self._pass(now)
        self._left = max(-self._burst, self._left - size)

    def wait(self, now: float) -> float:
        """Seconds until nothing is owed any more; 0 where nothing is."""
        self._pass(now)
        return max(0.0, -self._left / self._rate)

    def _pass(self, now: float) -> None:
        self._left = min(self._burst, self._left + self._rate * max(0.0, now - self._at))
        self._at = max(self._at, now)
