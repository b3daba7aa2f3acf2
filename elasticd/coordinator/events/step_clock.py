"""The time at which a step ended, from the clock of the worker that made it.

A report may wait long on its way: while nobody leads, agents keep the reports of workers that train on, and
hand all of them to the next leader at once. So a step's time is not that of its report's arrival. Rank 0 tells
the step's end by its own monotonic clock, and the offset from that clock to the leader's is the least that any
report took.

The next leader has the offset from the steps of the journal. It grows only where reports have come late for
`LATE_SECONDS` without a pause: then the clocks, and not the reports, have moved against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Seconds of arrivals, all of them later than the offset says, after which the offset was wrong.
LATE_SECONDS = 60.0
#: Seconds by which a report that is not late may be later than the one that was fastest.
STEADY_SECONDS = 0.05
#: Characters of a clock's name, at most: enough to tell two starts of a worker apart.
NAME_LENGTH = 16


def clock_name(incarnation: str, ended_at: float) -> str:
    """The name of the clock by which a worker told a step's end; empty where it told none (an older release),
    or no time at all."""
    return incarnation[:NAME_LENGTH] if 0.0 < ended_at < math.inf else ""


@dataclass(slots=True)
class StepClock:
    """The clock of the worker that is rank 0, beside the leader's."""

    name: str  # of the worker's clock
    offset_seconds: float  # from the worker's clock to the leader's
    late_since: float | None = None  # arrival of the first report of those that are late without a pause
    late_offset_seconds: float = 0.0  # the least of those reports

    def leader_time(self, ended_at: float, arrived_at: float) -> float:
        """The time of a step's end by the leader's clock.

        Args:
            ended_at: seconds of the worker's monotonic clock.
            arrived_at: unix seconds at which its report came.

        Returns:
            Unix seconds.
        """
        offset = arrived_at - ended_at
        if offset <= self.offset_seconds + STEADY_SECONDS:
            self.offset_seconds, self.late_since = min(self.offset_seconds, offset), None
            return ended_at + self.offset_seconds
        if self.late_since is None:
            self.late_since, self.late_offset_seconds = arrived_at, offset
        self.late_offset_seconds = min(self.late_offset_seconds, offset)
        if arrived_at - self.late_since >= LATE_SECONDS:
            self.offset_seconds, self.late_since = self.late_offset_seconds, None
        return ended_at + self.offset_seconds
