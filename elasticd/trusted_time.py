"""The wall clock of a new leader, as far as it can be trusted: a machine's clock may be days ahead before NTP.

The age of a record is the wall time less the time in the record. A leader whose clock is eight days ahead would
take a job that ended a minute ago for one of a week ago, and delete it. It would take a user's wish to stop a
job, which leaves ten minutes for a last checkpoint, for one whose time is up. So a wish ages by the seconds for
which leaders led, as their monotonic clocks counted them. What is deleted by age has an age of at most a
`JUMP_SECONDS` beyond the times that leaders wrote. Where no leader led for longer than that, records are kept
for longer.

What a leader with a wrong clock writes must not mislead the next one. So ends and pages of the journal carry a
stamp: the time at which the leader took over, as far as it was trusted, and what its monotonic clock counted
since. Stamps never run back, and may jump from one leader to the next, where the clock of the next is right. So
wishes and pages also carry the seconds for which leaders led, in all. What people read, as the time of an
event, is by the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticd_planner.value import Value

#: Seconds that may have passed since the newest time that a leader wrote.
JUMP_SECONDS = 86_400.0


class ReadTimes(Value, frozen=True, kw_only=True):
    """The times (unix seconds) by which a new leader reckons the ages of what it reads."""

    trusted: float  # by which records are old: this machine's clock, a `JUMP_SECONDS` beyond the newest at most
    stamp: float  # of what this leader writes as it takes over
    led: float  # seconds for which leaders led before it, as far as they wrote it

    @classmethod
    def of(cls, wall: float, written: Iterable[float], stamped: float = 0.0, led: float = 0.0) -> ReadTimes:
        """By this machine's clock, `wall`, the times that leaders wrote, and the newest stamp of the journal; 0
        for none (unix seconds). Releases before stamps wrote times of their wall clocks. led: the most seconds
        that leaders wrote."""
        newest = max((time for time in (*written, stamped) if time > 0), default=wall)
        if stamped:
            trusted = max(newest, min(wall, newest + JUMP_SECONDS))
            return cls(trusted=trusted, stamp=trusted, led=led)
        trusted = min(wall, newest + JUMP_SECONDS)
        return cls(trusted=trusted, stamp=max(newest, trusted), led=led)
