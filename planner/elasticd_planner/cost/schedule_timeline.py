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

from collections import deque
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
#: Up to so many pipelines a running maximum is numpy's own; of more, maxima over twice the distance each time.
_FEW = 16
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
    rounds = _Rounds(forward, backward, boundary)
    rounds.every(most)
    return rounds.drained()


class _Rounds:
    """The recurrence's state after a round, in arrays that each round changes; the first index is the stage, so
    that pipelines lie next to each other. `_chain` is when each stage ends its last pass (`free`) and, between
    stages, each boundary its last transfer forward; `back` when each boundary ends its last transfer backward.
    `round` counts the rounds so far, one number for each pipeline in a curve."""

    def __init__(self, forward: Times, backward: Times, boundary: Times) -> None:
        ahead = np.asarray(forward, dtype=np.float64)
        back = np.asarray(backward, dtype=np.float64)
        self.stages = ahead.shape[-1]
        between = (*ahead.shape[:-1], self.stages - 1)
        given = np.asarray(boundary, dtype=np.float64)
        given = np.broadcast_to(given, between) if given.size else np.zeros(between)
        if back.shape != ahead.shape or not self.stages:
            refuse(f"timeline: forward {ahead.shape} and backward {back.shape} must be alike")
        weights = np.empty((2 * self.stages - 1, *ahead.shape[:-1]))
        weights[0::2], weights[1::2] = np.moveaxis(ahead, -1, 0), np.moveaxis(given, -1, 0)
        self.backward = np.ascontiguousarray(np.moveaxis(back, -1, 0))
        self.boundary = weights[1::2].copy()
        self._until = np.cumsum(weights, axis=0)
        self._before = self._until - weights
        self._set(np.zeros(weights.shape), np.zeros(self.boundary.shape))
        self.round: Ints | int = 0

    def _set(self, chain: Floats, back: Floats) -> None:
        self._chain, self.free, self.back = chain, chain[0::2], back

    def fill(self, micro_batches: int) -> None:
        """All rounds with a forward pass; those that only repeat are added at once."""
        longest = _LONGEST * self.stages
        states, done, steady = deque[Floats](maxlen=longest + 1), 0, False
        while done < micro_batches:
            self._forward()
            self._backward(done, micro_batches)
            done += 1
            if steady or (micro_batches < 2 * longest and 0 < done % self.stages < self.stages - 1):
                continue  # its state would not be looked at
            states.append(self._state())
            if done % self.stages == 0 and (period := self._period(states, done, micro_batches)):
                steady = True
                moved = (states[-1] - states[-1 - period]).mean(0)
                repeats = (micro_batches - done) // period
                self._chain += moved * repeats
                self.back += moved * repeats
                done += repeats * period
        self.round = micro_batches

    def every(self, most: int) -> None:
        """The states after 1 to `most` rounds: [stage, most, ...] each."""
        states = [self._state()]
        for index in range(most):
            self._forward()
            self._backward(index, most)
            states.append(self._state())
            if period := self._period(states, index + 1, most):
                moved = (states[-1] - states[-1 - period]).mean(0)
                for _ in range(index + 1, most):
                    states.append(states[-period] + moved)
                break
        chain, back = np.split(np.stack(states[1:], axis=1), (2 * self.stages - 1,))
        self._set(chain, back)
        self.backward, self.boundary = self.backward[:, None], self.boundary[:, None]
        self.round = np.arange(1, most + 1).reshape((most,) + (1,) * (chain.ndim - 2))

    def _period(self, states: Sequence[Floats], done: int, micro_batches: int) -> int:
        """The least number of rounds that moved all times by one amount, 0 where there is none yet. Longer ones
        than a round are looked for now and then, as long as many rounds are left. `states`: the last of so many
        rounds, and that before them."""
        longest = _LONGEST * self.stages
        # Before that not every stage has run backward in each of these rounds.
        often = done % longest == 0 and micro_batches - done >= longest
        most = min(done - self.stages, longest if often else 1)
        if most < 1:
            return 0
        last = states[-1]
        if most == 1:
            moved = last - states[-2]
            return int((moved.max(0) - moved.min(0)).max() <= ALIKE * last.max())
        before = [states[at] for at in range(len(states) - 1 - most, len(states) - 1)]
        moved = last - np.stack(before)  # [periods, times, ...], the longest first
        differ = (moved.max(1) - moved.min(1)).reshape(most, -1).max(-1)
        found = np.flatnonzero(differ[::-1] <= ALIKE * float(last.max()))
        return int(found[0]) + 1 if len(found) else 0

    def drained(self) -> Floats:
        """The end of the last pass, after the rounds that only run backward."""
        micro_batches = self.round
        for more in range(self.stages - 1):
            if isinstance(micro_batches, int):
                self._backward(micro_batches + more, micro_batches)
            else:
                self._some_backward(micro_batches + more, micro_batches)
        end: Floats = self.free.max(0)
        return end

    def _forward(self) -> None:
        """One micro-batch through all stages and boundaries: a running maximum along the chain."""
        chain = self._chain
        np.subtract(chain, self._before, out=chain)
        if chain.size <= _FEW * len(chain):
            np.maximum.accumulate(chain, axis=0, out=chain)
        else:
            step = 1
            while step < len(chain):
                np.maximum(chain[step:], chain[:-step], out=chain[step:])
                step *= 2
        np.add(chain, self._until, out=chain)

    def _backward(self, index: int, micro_batches: int) -> None:
        """Round `index`: the backward pass that is due on each stage from `first` to `stop`."""
        first, stop = max(0, self.stages - 1 - index), min(self.stages, self.stages + micro_batches - 1 - index)
        if first >= stop:
            return
        free, back, last = self.free, self.back, min(stop, self.stages - 1)
        np.maximum(free[first:last], back[first:last], out=free[first:last])
        np.add(free[first:stop], self.backward[first:stop], out=free[first:stop])
        start = max(first, 1)
        sent = back[start - 1 : stop - 1]
        np.maximum(free[start:stop], sent, out=sent)
        np.add(sent, self.boundary[start - 1 : stop - 1], out=sent)

    def _some_backward(self, index: Ints, micro_batches: Ints) -> None:
        """The same in a curve, whose numbers of rounds differ."""
        ready = self.free.copy()
        np.maximum(ready[:-1], self.back, out=ready[:-1])
        ready += self.backward
        behind = np.arange(self.stages - 1, -1, -1)  # stages after each one
        micro = index - behind.reshape((-1,) + (1,) * index.ndim)
        due = (micro >= 0) & (micro < micro_batches)
        np.copyto(self.free, ready, where=due)
        sent = np.maximum(self.free[1:], self.back) + self.boundary
        np.copyto(self.back, sent, where=due[1:])

    def _state(self) -> Floats:
        return np.concatenate((self._chain, self.back))
