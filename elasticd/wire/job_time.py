"""The wall time of a job: the parts of it in steps that count, and in each kind of loss."""

from __future__ import annotations

import msgspec
from elasticd_planner.value import Value


class JobTime(Value, frozen=True, kw_only=True):
    """The uses of a job's wall time so far."""

    began: float  # unix seconds at which its first step began
    last: float  # unix seconds at which its newest step was reported
    productive: float  # seconds of the steps of the surviving history
    steps: int  # of the surviving history, as far as they are known
    repeated: int  # steps that were done again
    lost: dict[str, float] = msgspec.field(default_factory=dict)  # seconds by cause
    times: dict[str, int] = msgspec.field(default_factory=dict)  # how often, by cause
    healthy: float | None = None  # seconds of a step at the healthy speed (None: too few steps)

    def wall(self, now: float | None = None) -> float:
        """Seconds since the first step began, up to `now` (None: to the newest step)."""
        return max(self.last if now is None else now, self.last) - self.began

    def ettr(self, now: float | None = None) -> float | None:
        """The part of the wall time that went into steps that count; None where there was none."""
        wall = self.wall(now)
        return min(1.0, self.productive / wall) if wall > 0 else None

    def goodput(self, now: float | None = None) -> float | None:
        """The same where a step counts for what it takes at the healthy speed."""
        wall = self.wall(now)
        if wall <= 0 or self.healthy is None:
            return None
        return min(1.0, self.productive / wall, self.steps * self.healthy / wall)
