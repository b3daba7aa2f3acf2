"""The time of a pipeline from its stages: by the schedule itself, or by a formula.

With t_j the work of stage j on one micro-batch (forward f_j and backward), b_j the boundary after it, one way,
p stages and m micro-batches, 1F1B takes at least, for every stage j (`at_least`),

    sum_i (t_i + 2 b_i) + (m - 1) t_j - h_j f_j,      h_j = min(m - 1, p - 1 - j),
    sum_{i < j} (t_i + 2 b_i) + m t_j.

The second: before its first pass stage j waits for one micro-batch's way there, then it works on m, then the
last gradient goes the way back. The first: the first backward pass of stage j comes after the first
micro-batch's way to the end and back; by then at most h_j + 1 forward passes of stage j can be done, for that
is where 1F1B makes it turn, and all other work of its m micro-batches comes after, and then the way back. So
h_j f_j is what a stage hides of the time that others need: `hidden` is the largest f_j / t_j.

The third (`at_least_in_turns`) is of stages i to j, n of them: the backward pass of micro-batch r + n on stage
j comes after that of micro-batch r by no less than

    sum_{i <= k <= j} t_k + 2 sum_{i <= k < j} b_k,

for the gradient of r goes to stage i, the next forward pass there is that of r + p - i (stages counted from 0),
its activation goes to stage j, and the next backward pass there is that of r + n.

The formula, (m - 1) max_j s_j + sum_j s_j with s_j = t_j + 2 b_j, is what equal stages take. Where boundaries
cost nothing and forward is the same part of every stage's work, no schedule was found to take longer (a test
looks for one; it is not proved), and unequal stages take up to a fifth less. A boundary, or stages of which
only some recompute, can make it up to a tenth longer: so the formula leads searches, and proves nothing.

`Schedule` is exact (`schedule_timeline`); its times come from clocks. Problems whose format defines the time by
the formula have `Formula`. `Steady` is what earlier planners minimise: m max_j s_j, as if pipelines neither
filled nor drained. It is the formula where the slowest stage alone is on a micro-batch's way. The search, which
goes by lines (o: seconds of the slowest stage, S: of all), asks the timing for that way: `first`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from elasticd_planner.cost.schedule_timeline import one_f_one_b_curve, one_f_one_b_seconds, played_seconds
from elasticd_planner.numeric import Bools, Floats, Ints
from elasticd_planner.value import refuse

#: The part of a stage's work that is its forward pass: two operations of six per element (Kaplan et al. 2020).
#: So a block that runs forward once more in the backward pass takes a third longer.
FORWARD = 1 / 3

#: Numbers of stages whose turns bound a pipeline: bounds of those between are no better by much.
TURNS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

#: So many micro-batches that nothing but the slowest stage counts.
MANY = 10**6

#: Of one pipeline, or of many.
Seconds = TypeVar("Seconds", float, Floats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one micro-batch on each stage, [..., stage], and between stages one way, [..., stage - 1].
    Leading indices are pipelines with as many stages. Of an interleaved pipeline: by chunk, as they come."""

    forward: Floats
    backward: Floats
    boundary: Floats

    @property
    def work(self) -> Floats:
        """Seconds of one micro-batch on each stage, forward and backward: [..., stage]."""
        return self.forward + self.backward

    def of(self, some: Bools | Ints) -> Times:
        """The times of some of these pipelines."""
        return Times(forward=self.forward[some], backward=self.backward[some], boundary=self.boundary[some])

    @property
    def charged(self) -> Floats:
        """Work, with the boundary's way there and back charged to the sender."""
        seconds = self.work
        seconds[..., :-1] += 2 * self.boundary
        return seconds


class Timing(Protocol):
    """The seconds of pipelines for a step."""

    @property
    def hidden(self) -> float:
        """The largest part of a stage's work that may run while it waits for stages after it; 0: none."""

    @property
    def fill(self) -> int:
        """Micro-batches that one more stage costs a pipeline while it fills and drains: 1 or 0."""

    def first(self, caps: Seconds, sums: Seconds) -> Seconds:
        """Seconds of the first micro-batch; the slowest stage takes `caps` of them and all stages `sums`."""

    def counted(self, micro_batches: int) -> int:
        """The number of micro-batches for which the formula's best layers are the best for so many."""

    def seconds(self, times: Times, micro_batches: int, limit: float = math.inf) -> Floats:
        """Of pipelines with these stages: [...]. Those shown to take longer than `limit` may be inf."""

    def curve(self, times: Times, most: int) -> Floats:
        """The same for 1 to `most` micro-batches: [most, ...]."""

    def interleaved(self, times: Times, micro_batches: int, chunks: int) -> float:
        """Of one interleaved pipeline, each stage of so many chunks."""


class _Filling:
    """Timings of a step, in which pipelines fill and drain."""

    __slots__ = ()

    @property
    def fill(self) -> int:
        """One: each stage waits for the first micro-batch to come."""
        return 1

    def first(self, caps: Seconds, sums: Seconds) -> Seconds:
        """The way through all stages."""
        return sums

    def counted(self, micro_batches: int) -> int:
        """So many."""
        return micro_batches


@dataclass(frozen=True, slots=True)
class Formula(_Filling):
    """The slowest stage runs without a gap, all others fill and drain. Exact for equal stages alone."""

    @property
    def hidden(self) -> float:
        """None: the formula hides no work."""
        return 0.0

    def seconds(self, times: Times, micro_batches: int, limit: float = math.inf) -> Floats:
        """Seconds of a step by the formula: [...], whatever the limit."""
        return closed(times.charged, micro_batches)

    def curve(self, times: Times, most: int) -> Floats:
        """Seconds of a step by the formula for 1 to `most` micro-batches: [most, ...]."""
        counts = np.arange(1, most + 1).reshape((most,) + (1,) * (times.forward.ndim - 1))
        return closed(times.charged, counts)

    def interleaved(self, times: Times, micro_batches: int, chunks: int) -> float:
        """Raises Invalid: the formula says nothing of interleaved stages."""
        refuse("a problem in units says what equal stages take, not interleaved ones: give it model.times")


#: The formula; it depends on nothing.
FORMULA = Formula()


@dataclass(frozen=True, slots=True)
class Schedule(_Filling):
    """1F1B as it runs. `hidden`: the largest part of any stage's work that is its forward pass."""

    hidden: float = FORWARD

    def seconds(self, times: Times, micro_batches: int, limit: float = math.inf) -> Floats:
        """Seconds of a step as 1F1B runs: [...]. Those shown to take longer than the limit may be inf."""
        if math.isinf(limit):
            return one_f_one_b_seconds(times.forward, times.backward, times.boundary, micro_batches)
        possible = at_least(times, micro_batches) <= limit
        seconds = np.full(possible.shape, math.inf)
        if possible.any():
            possible[possible] = at_least_in_turns(times.of(possible), micro_batches) <= limit
        if possible.any():
            some = times.of(possible)
            seconds[possible] = one_f_one_b_seconds(
                some.forward, some.backward, some.boundary, micro_batches, limit
            )
        return seconds

    def curve(self, times: Times, most: int) -> Floats:
        """Seconds of a step as 1F1B runs for 1 to `most` micro-batches: [most, ...]."""
        return one_f_one_b_curve(times.forward, times.backward, times.boundary, most)

    def interleaved(self, times: Times, micro_batches: int, chunks: int) -> float:
        """Seconds of a step of one interleaved pipeline, stages of so many chunks."""
        return played_seconds(times.forward, times.backward, times.boundary, micro_batches, chunks)


@dataclass(frozen=True, slots=True)
class Steady:
    """The steady state: each micro-batch takes the slowest stage's time; pipelines neither fill nor drain."""

    @property
    def hidden(self) -> float:
        """None: nothing waits."""
        return 0.0

    @property
    def fill(self) -> int:
        """None."""
        return 0

    def first(self, caps: Seconds, sums: Seconds) -> Seconds:
        """As long as any other one."""
        return caps

    def counted(self, micro_batches: int) -> int:
        """So many that the slowest stage alone counts; of layers that are as good the shortest way."""
        return MANY

    def seconds(self, times: Times, micro_batches: int, limit: float = math.inf) -> Floats:
        """Seconds of all micro-batches on the slowest stage: [...], whatever the limit."""
        return np.asarray(micro_batches * times.charged.max(-1))

    def curve(self, times: Times, most: int) -> Floats:
        """The same for 1 to `most` micro-batches: [most, ...]."""
        slowest = times.charged.max(-1)
        return np.asarray(np.arange(1, most + 1).reshape((most,) + (1,) * slowest.ndim) * slowest)

    def interleaved(self, times: Times, micro_batches: int, chunks: int) -> float:
        """The same of one pipeline, the chunks of a stage together."""
        return micro_batches * float(times.charged.reshape(chunks, -1).sum(0).max())


def closed(stages: Sequence[float] | Floats, micro_batches: int | Ints) -> Floats:
    """(m - 1) x the slowest stage + the sum of all: [..., stage] to [...]."""
    seconds = np.asarray(stages, dtype=np.float64)
    found: Floats = (micro_batches - 1) * seconds.max(-1) + seconds.sum(-1)
    return found


def at_least(times: Times, micro_batches: int) -> Floats:
    """Seconds that 1F1B cannot beat, by the two inequalities above: [...]."""
    work, stages = times.work, times.work.shape[-1]
    through = times.charged
    before = np.cumsum(through, axis=-1) - through
    after = through.sum(-1)[..., None] - before - work
    turns = np.minimum(micro_batches - 1, np.arange(stages - 1, -1, -1))
    found: Floats = (before + micro_batches * work + np.maximum(0.0, after - turns * times.forward)).max(-1)
    return found


def at_least_in_turns(times: Times, micro_batches: int) -> Floats:
    """Seconds that 1F1B cannot beat, by the third inequality above with some numbers of stages: [...]."""
    forward, backward, stages = times.forward, times.backward, times.forward.shape[-1]
    none = np.zeros((*forward.shape[:-1], 1))
    sent = np.concatenate((none, np.cumsum(times.boundary, axis=-1)), axis=-1)  # boundaries before a stage
    worked = np.concatenate((none, np.cumsum(forward + backward, axis=-1)), axis=-1)  # of the stages before it
    # The first micro-batch there and back to stage j, and the last one's way back from there.
    ways = (forward.sum(-1) + backward.sum(-1) + 2 * sent[..., -1])[..., None]
    least: Floats = np.zeros(forward.shape[:-1])
    for turn in (turn for turn in TURNS if turn <= stages):
        last = np.arange(turn - 1, stages)
        first = last - turn + 1
        turns = np.maximum(0, (micro_batches - 1 - stages + first) // turn + 1)
        once = worked[..., turn:] - worked[..., : stages - turn + 1] + 2 * (sent[..., last] - sent[..., first])
        seconds = ways + turns * once
        seconds += np.maximum(0, micro_batches - 1 - turns * turn) * backward[..., last]
        seconds += np.maximum(0, micro_batches - turns * turn - stages + last) * forward[..., last]
        least = np.maximum(least, seconds.max(-1))
    return least
