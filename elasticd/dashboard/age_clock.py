"""The time by which rows of the history are too old: a clock that is wrong makes no row old.

A machine's clock may be days ahead before NTP sets it, and `keep_days` counted from it would delete all that
there is. This clock begins at most a `JUMP` beyond where the dashboard before left it. From then on it follows
the wall clocks of this machine and of the leader, whichever is earlier, at most at twice the speed of time.
After a pause of weeks rows are kept for longer; the bound in bytes holds at all times.
"""

from __future__ import annotations

from elasticd.trusted_time import ReadTimes


class AgeClock:
    """Reads unix seconds by `read`.

    Args:
        before: unix seconds at which it stood last; 0 for a history of which nothing is known.
        wall: unix seconds by the machine's clock.
        monotonic: seconds of a clock that nobody sets.
    """

    def __init__(self, before: float, wall: float, monotonic: float) -> None:
        self._at = ReadTimes.of(wall, (before,)).trusted
        self._read_at = monotonic

    def read(self, wall: float, monotonic: float) -> float:
        """The time now, in unix seconds: no later than `wall`."""
        most = self._at + 2.0 * (monotonic - self._read_at)
        self._at, self._read_at = max(self._at, min(wall, most)), monotonic
        return min(wall, self._at)
