"""Slowness history: whether a straggler is transient, periodic, irregular or persistent."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from elasticd_planner.value import Value


class SlownessKind(enum.StrEnum):
    """When a device was slow. The values are the words of the JSON answers since release 0.1."""

    NONE = ""
    TRANSIENT = "one-off"  # once
    PERIODIC = "periodic"  # at about equal distances
    IRREGULAR = "irregular"  # several times
    PERSISTENT = "chronic"  # for a long time, and still

    @property
    def word(self) -> str:
        """As screens say it."""
        return self.name.lower() if self is not SlownessKind.NONE else ""


#: Times that are kept of a device.
MOST_KEPT = 12

#: Occurrences that show a period, and by which fraction of it they may stray.
PERIOD_TIMES = 4
STRAY = 0.2


class Episode(Value, frozen=True, kw_only=True):
    """A time in which a device was slow."""

    start: int  # its first step; -1: a probe showed it, before the first step
    stop: int | None  # the step after its last; None: it is still slow
    rate: float  # its last slowdown

    def steps(self, now: int) -> int:
        """The number of steps that it has lasted by step `now`."""
        return (self.stop if self.stop is not None else now + 1) - self.start


class Slowness(Value, frozen=True, kw_only=True):
    """The kind of straggler that a device is, and the reason."""

    kind: SlownessKind
    reason: str
    period: int | None = None  # steps from one slow time to the next, where it is periodic


def classify(episodes: Sequence[Episode], spikes: Sequence[int], now: int, persistent_steps: int) -> Slowness:
    """Returns the kind of straggler that a device is.

    Args:
        episodes: the times in which it was slow.
        spikes: its single slow steps.
        now: the last step.
        persistent_steps: steps after which a device that is still slow is called persistent.
    """
    current = episodes[-1] if episodes and episodes[-1].stop is None else None
    if current is not None and current.steps(now) >= persistent_steps:
        return Slowness(kind=SlownessKind.PERSISTENT, reason=f"slow for {current.steps(now)} steps now")
    starts = [episode.start for episode in episodes]
    for times, what in ((starts, "slow"), (_apart(spikes), "slow for a step")):
        period = detect_period(times)
        if period is not None:
            reason = f"{what} about every {period} steps, {len(times)} times so far"
            return Slowness(kind=SlownessKind.PERIODIC, reason=reason, period=period)
    count = len(episodes)
    kind = SlownessKind.TRANSIENT
    if count > 1:
        spent, span = sum(episode.steps(now) for episode in episodes), now + 1 - starts[0]
        kind, reason = SlownessKind.IRREGULAR, f"slow {count} times, {spent} of the last {span} steps"
    elif current is not None:
        since = f"step {current.start}" if current.start >= 0 else "before the first step"
        reason = f"slow since {since}, for the first time"
    elif episodes:
        (only,) = episodes
        last = (only.stop or 0) - 1
        if last < 0:
            reason = "slow once, before the first step"
        elif only.start < 0:
            reason = f"slow once, from before the first step to step {last}"
        else:
            reason = f"slow once, in steps {only.start} to {last}"
    elif len(spikes) > 1:
        kind, reason = SlownessKind.IRREGULAR, f"{len(spikes)} single slow steps, the last was {spikes[-1]}"
    elif spikes:
        reason = f"a single slow step, {spikes[-1]}"
    else:
        kind, reason = SlownessKind.NONE, "never slow so far"
    return Slowness(kind=kind, reason=reason)


def detect_period(times: Sequence[int]) -> int | None:
    """The steps between times that come at about equal distances; None where they do not, or are too few. A
    time that was missed (a distance of two or three periods) does not break the period."""
    if len(times) < PERIOD_TIMES:
        return None
    gaps = [after - before for before, after in pairwise(times)]
    period = median(gaps)
    if period < 2:
        return None
    strays = sum(abs(gap / period - max(1, round(gap / period))) > STRAY for gap in gaps)
    missed = sum(round(gap / period) != 1 for gap in gaps)
    regular = strays == 0 if len(gaps) < 6 else strays <= len(gaps) // 6
    return round(period) if regular and missed <= len(gaps) // 3 else None


def _apart(spikes: Sequence[int]) -> list[int]:
    """Spikes, those right after another counted with it."""
    return [step for index, step in enumerate(spikes) if not index or step - spikes[index - 1] > 1]
