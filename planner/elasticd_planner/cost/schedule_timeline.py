"""The end of the 1F1B schedule, exactly: plain by a recurrence, interleaved pass by pass. Seconds everywhere.

A pipeline of p stages and m micro-batches. Each stage runs its passes in the order of 1F1B (`schedule`), plain
or interleaved. A pass begins once the stage is free and its input is there; a boundary carries one micro-batch
after the other in each direction, beside computation; in an interleaved pipeline there is one more boundary,
from the last stage to the first. `one_f_one_b_seconds` gives the end of the plain schedule for times that
depend on the stage alone, `played_seconds` that of any, pass by pass (`layout.pass_order`).

The recurrence. Round r is the forward pass of micro-batch r on all stages and then, on stage s, the backward
pass of micro-batch r - (p - s - 1): whatever these wait for lies in the same chain of stages or in an earlier
round. So a round is one running maximum over stages, whatever the number of micro-batches. In (max, +) it is
linear: once so many rounds move all times by one amount, so do any that follow (Baccelli et al.,
Synchronization and Linearity, 1992, section 3.7), and the rest is added at once. It is several rounds where
messages are what limits: a micro-batch goes there and back while the stages run others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.pass_order import PassTime, timed_passes
from elasticd_planner.numeric import Floats, Ints
from elasticd_planner.value import refuse

#: Times by stage, or by pipeline and stage: all pipelines of an array have as many stages.
Times = Sequence[float] | Sequence[Sequence[float]] | Floats

#: Rounds count as alike if their times moved by amounts that differ less than this, relative to the time.
ALIKE = 1e-13
#: The longest period that is looked for, in rounds for each stage.
_LONGEST = 4


def played_seconds(
    forward: Sequence[float] | Floats,
    backward: Sequence[float] | Floats,
    boundary: Sequence[float] | Floats,
    micro_batches: int,
    chunks: int = 1,
) -> float:
    """Seconds of a step of one pipeline of stages with so many chunks, plain or interleaved. forward, backward:
    [place], of one micro-batch, places in the order in which it meets them; boundary: [place - 1], one way (may
    be empty for none). Each pass is looked at once."""
    return max(stage[-1].stop for stage in pass_times(forward, backward, boundary, micro_batches, chunks))


def pass_times(
    forward: Sequence[float] | Floats,
    backward: Sequence[float] | Floats,
    boundary: Sequence[float] | Floats,
    micro_batches: int,
    chunks: int = 1,
) -> list[list[PassTime]]:
    """When each pass of each stage of one pipeline runs, in the order of the stage: what `played_seconds` gives
    the end of. Arguments as there."""
    ahead, back, between = (np.asarray(times, dtype=np.float64) for times in (forward, backward, boundary))
    if micro_batches < 1 or ahead.shape != back.shape or ahead.ndim != 1:
        refuse(f"timeline: {micro_batches} micro-batches, forward {ahead.shape} and backward {back.shape}")
    ahead, back = (np.repeat(times[:, None], micro_batches, 1) for times in (ahead, back))
    return timed_passes(passes, ahead.tolist(), back.tolist(), between.tolist(), chunks)


def one_f_one_b_seconds(forward: Times, backward: Times, boundary: Times, micro_batches: int) -> Floats:
    """Seconds of a step of one pipeline, or of each of many with as many stages.

    forward, backward: [..., stage], of one micro-batch; boundary: [..., stage - 1], one way (may be empty for
    none); the result has the leading dimensions.
    """
    if micro_batches < 1:
        refuse(f"timeline: micro_batches must be at least 1, not {micro_batches}")
    rounds = _Rounds(forward, backward, boundary)
    rounds.fill(micro_batches)
    return rounds.drained()


def one_f_one_b_curve(forward: Times, backward: Times, boundary: Times, most: int) -> Floats:
    """The same for 1 to `most` micro-batches at once: [most, ...]. Their first rounds are the same, and they
    drain together."""
    if most < 1:
        refuse(f"timeline: micro_batches must be at least 1, not {most}")
    return _Rounds(forward, backward, boundary).every(most).drained()


class _Rounds:
    """The recurrence's state after a round. `free` is when each stage ends its last pass, `ahead` and `back`
    when each boundary ends its last transfer, forward and backward. `round` counts the rounds so far, one
    number for each leading index in a curve."""

    def __init__(self, forward: Times, backward: Times, boundary: Times) -> None:
        self.forward = np.asarray(forward, dtype=np.float64)
        self.backward = np.asarray(backward, dtype=np.float64)
        self.stages = self.forward.shape[-1]
        shape = self.forward.shape
        between = (*shape[:-1], self.stages - 1)
        given = np.asarray(boundary, dtype=np.float64)
        self.boundary = np.broadcast_to(given, between) if given.size else np.zeros(between)
        if self.backward.shape != shape or not self.stages:
            refuse(f"timeline: forward {shape} and backward {self.backward.shape} must be alike")
        self.behind = np.arange(self.stages - 1, -1, -1)  # stages after each one
        weights = np.empty((*shape[:-1], 2 * self.stages - 1))
        weights[..., 0::2], weights[..., 1::2] = self.forward, self.boundary
        self._until = np.cumsum(weights, axis=-1)
        self._before = self._until - weights
        self.free = np.zeros(shape)
        self.ahead = np.zeros(between)
        self.back = np.zeros(between)
        self.round: Ints | int = 0

    def fill(self, micro_batches: int) -> None:
        """All rounds with a forward pass; those that only repeat are added at once."""
        states, done, steady = [self._state()], 0, False
        while done < micro_batches:
            self._forward()
            self._backward(done, micro_batches)
            done += 1
            if steady:
                continue
            states = [*states[-_LONGEST * self.stages :], self._state()]
            if period := self._period(states, done):
                steady = True
                moved = (states[-1] - states[-1 - period]).mean(-1)
                repeats = (micro_batches - done) // period
                self._add(moved * repeats)
                done += repeats * period
        self.round = micro_batches

    def every(self, most: int) -> _Rounds:
        """The states after 1 to `most` rounds, stacked in front."""
        states = [self._state()]
        for index in range(most):
            self._forward()
            self._backward(index, most)
            states.append(self._state())
            if period := self._period(states, index + 1):
                moved = (states[-1] - states[-1 - period]).mean(-1)[..., None]
                for _ in range(index + 1, most):
                    states.append(states[-period] + moved)
                break
        stacked = _Rounds(
            *(np.broadcast_to(t, (most, *t.shape)) for t in (self.forward, self.backward, self.boundary))
        )
        ends = np.cumsum((self.stages, self.stages - 1))
        stacked.free, stacked.ahead, stacked.back = np.split(np.stack(states[1:]), ends, axis=-1)
        shape = (most,) + (1,) * self.forward.ndim
        stacked.round = np.arange(1, most + 1).reshape(shape)
        return stacked

    def _period(self, states: Sequence[Floats], done: int) -> int:
        """The least number of rounds that moved all times by one amount, 0 where there is none yet. Longer ones
        than a round are looked for now and then. `states`: the last of so many rounds, and that before them."""
        longest = _LONGEST * self.stages
        # Before that not every stage has run backward in each of these rounds.
        most = min(done - self.stages, longest if done % longest == 0 else 1)
        if most < 1:
            return 0
        last = states[-1]
        if most == 1:
            moved = last - states[-2]
            return int((moved.max(-1) - moved.min(-1)).max() <= ALIKE * last.max())
        moved = last - np.stack(states[-1 - most : -1])  # [periods, ..., times], the longest first
        differ = (moved.max(-1) - moved.min(-1)).reshape(most, -1).max(-1)
        found = np.flatnonzero(differ[::-1] <= ALIKE * float(last.max()))
        return int(found[0]) + 1 if len(found) else 0

    def drained(self) -> Floats:
        """The end of the last pass, after the rounds that only run backward."""
        micro_batches = self.round
        for more in range(self.stages - 1):
            self._backward(micro_batches + more, micro_batches)
        end: Floats = self.free.max(-1)
        return end

    def _forward(self) -> None:
        """One micro-batch through all stages and boundaries: a running maximum along the chain."""
        ends = np.empty(self._until.shape)
        ends[..., 0::2], ends[..., 1::2] = self.free, self.ahead
        ends -= self._before
        np.maximum.accumulate(ends, axis=-1, out=ends)
        ends += self._until
        self.free, self.ahead = ends[..., 0::2], ends[..., 1::2]

    def _backward(self, index: Ints | int, micro_batches: Ints | int) -> None:
        """Round `index`: on each stage the backward pass that is due, if there is one."""
        ready = self.free.copy()
        np.maximum(ready[..., :-1], self.back, out=ready[..., :-1])
        ready += self.backward
        if isinstance(index, int) and self.stages - 1 <= index < micro_batches:  # each stage has one
            self.free, self.back = ready, np.maximum(ready[..., 1:], self.back) + self.boundary
            return
        micro = index - self.behind
        due = (micro >= 0) & (micro < micro_batches)
        self.free = np.where(due, ready, self.free)
        sent = np.maximum(self.free[..., 1:], self.back) + self.boundary
        self.back = np.where(due[..., 1:], sent, self.back)

    def _state(self) -> Floats:
        return np.concatenate((self.free, self.ahead, self.back), axis=-1)

    def _add(self, seconds: Floats) -> None:
        amount = np.asarray(seconds)[..., None]
        self.free, self.ahead, self.back = self.free + amount, self.ahead + amount, self.back + amount
