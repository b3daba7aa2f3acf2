"""What kind of slowness a device has: chronic, periodic or one-off, told from when it was slow so far."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

from elasticd_planner.value import Value

Kind = Literal["", "one-off", "periodic", "irregular", "chronic"]

#: Times that are kept of a device.
MOST_KEPT = 12

#: Occurrences that show a rhythm, and by how much of their distance they may stray from it.
RHYTHM = 4
STRAY = 0.2


class Episode(Value, frozen=True, kw_only=True):
    """A device was slow from step `start` to before step `stop` (None: it still is), `rate` times in the
    end."""

    start: int
    stop: int | None
    rate: float

    def steps(self, now: int) -> int:
        return (self.stop if self.stop is not None else now + 1) - self.start


class Slowness(Value, frozen=True, kw_only=True):
    """The kind and why. period: steps from one time to the next where it is periodic."""

    kind: Kind
    reason: str
    period: int | None = None


def classify(episodes: Sequence[Episode], spikes: Sequence[int], now: int, chronic: int) -> Slowness:
    """Of a device's slow times and its single slow steps, up to step `now`. Slowness that lasts `chronic` steps
    is chronic; times that come at equal distances are periodic; one that ended is one-off."""
    current = episodes[-1] if episodes and episodes[-1].stop is None else None
    if current is not None and current.steps(now) >= chronic:
        return Slowness(kind="chronic", reason=f"slow for {current.steps(now)} steps now")
    starts = [episode.start for episode in episodes]
    for times, what in ((starts, "slow"), (_apart(spikes), "slow for a step")):
        period = rhythm(times)
        if period is not None:
            reason = f"{what} about every {period} steps, {len(times)} times so far"
            return Slowness(kind="periodic", reason=reason, period=period)
    count = len(episodes)
    if count > 1:
        spent, span = sum(episode.steps(now) for episode in episodes), now + 1 - starts[0]
        reason = f"slow {count} times, {spent} of the last {span} steps"
        return Slowness(kind="irregular", reason=reason)
    if current is not None:
        return Slowness(kind="one-off", reason=f"slow since step {current.start}, for the first time")
    if episodes:
        (only,) = episodes
        return Slowness(kind="one-off", reason=f"slow once, in steps {only.start} to {(only.stop or 0) - 1}")
    if len(spikes) > 1:
        return Slowness(kind="irregular", reason=f"{len(spikes)} single slow steps, the last was {spikes[-1]}")
    if spikes:
        return Slowness(kind="one-off", reason=f"a single slow step, {spikes[-1]}")
    return Slowness(kind="", reason="never slow so far")


def rhythm(times: Sequence[int]) -> int | None:
    """The steps between times that come at about equal distances; None where they do not, or are too few. A
    time that was missed (a distance of two or three periods) does not break the rhythm."""
    if len(times) < RHYTHM:
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
