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

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from elasticd_planner.cost.schedule import passes
from elasticd_planner.layout.pass_order import PassTime, timed_passes
from elasticd_planner.numeric import Bools, Floats, Ints
from elasticd_planner.value import refuse

#: Times by stage, or by pipeline and stage: all pipelines of an array have as many stages.
Times = Sequence[float] | Sequence[Sequence[float]] | Floats

#: Rounds count as alike if their times moved by amounts that differ less than this, relative to the time.
ALIKE = 1e-13
#: A sum of times is off by no more than this part of it.
_ROUNDED = 1e-12
#: Up to so many pipelines a running maximum is numpy's own; of more, it is made row by row.
_FEW = 64
#: The longest period that is looked for, in rounds for each stage, where many rounds are left; and after every
#: `_LOOK` rounds one of so many.
_LONGEST, _SHORT, _LOOK = 4, 8, 16


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


def one_f_one_b_seconds(
    forward: Times, backward: Times, boundary: Times, micro_batches: int, limit: float = math.inf
) -> Floats:
    """Seconds of a step of one pipeline, or of each of many with as many stages.

    forward, backward: [..., stage], of one micro-batch; boundary: [..., stage - 1], one way (may be empty for
    none); the result has the leading dimensions. Pipelines that must take longer than the limit may have inf.
    """
    if micro_batches < 1:
        refuse(f"timeline: micro_batches must be at least 1, not {micro_batches}")
    rounds = _Rounds(forward, backward, boundary)
    rounds.fill(micro_batches, limit)
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
    """The recurrence's state after a round, in arrays that each round changes; the first index is the stage and
    the last one the pipeline, so that pipelines lie next to each other. `_chain` is when each stage ends its
    last pass (`free`) and, between stages, each boundary its last transfer forward; `back` when each boundary
    ends its last transfer backward. `round` counts the rounds so far, one number for each of a curve."""

    def __init__(self, forward: Times, backward: Times, boundary: Times) -> None:
        ahead = np.asarray(forward, dtype=np.float64)
        back = np.asarray(backward, dtype=np.float64)
        self._leading, self.stages = ahead.shape[:-1], ahead.shape[-1]
        between = (*self._leading, self.stages - 1)
        given = np.asarray(boundary, dtype=np.float64)
        given = np.broadcast_to(given, between) if given.size else np.zeros(between)
        if back.shape != ahead.shape or not self.stages:
            refuse(f"timeline: forward {ahead.shape} and backward {back.shape} must be alike")
        count = math.prod(self._leading)
        ahead, back, given = (part.reshape(count, part.shape[-1]).T for part in (ahead, back, given))
        weights = np.empty((2 * self.stages - 1, count))
        weights[0::2], weights[1::2] = ahead, given
        until = np.cumsum(weights, axis=0)
        #: Times forward, backward and of boundaries; of the way forward until after each place, and before it.
        self._parts: tuple[Floats, ...] = (
            *(weights[0::2].copy(), np.ascontiguousarray(back), weights[1::2].copy()),
            *(until, until - weights),
        )
        self._count, self._rest = count, np.arange(count)  # of all pipelines, and those that are played further
        self._set(np.zeros(weights.shape), np.zeros(given.shape))
        self.round: Ints | int = 0

    def _set(self, chain: Floats, back: Floats) -> None:
        self._chain, self.free, self.back = chain, chain[0::2], back
        self._pairs = [*pairwise(chain)] if chain[0].size > _FEW else []

    def fill(self, micro_batches: int, limit: float = math.inf) -> None:
        """All rounds with a forward pass. Rounds that only repeat are added at once. A pipeline that came so
        far, or that must take longer than the limit, is left out of further rounds."""
        longest = _LONGEST * self.stages
        many = micro_batches >= 2 * longest
        states, done = deque[Floats](maxlen=longest + 1 if many else _SHORT + 1), 0
        whole, ended, parts = self._state(), np.zeros(self._count, dtype=bool), self._parts
        while done < micro_batches and len(self._rest):
            self._forward()
            self._backward(done, micro_batches)
            done += 1
            if many or (len(self._rest) <= _FEW and not 0 < done % _LOOK < _LOOK - _SHORT):
                states.append(self._state())  # others would not be looked at, or take longer than they save
            if done % _LOOK or done <= self.stages:
                continue
            most = longest if many and done % longest < _LOOK and micro_batches - done >= longest else _SHORT
            periods = self._periods(states, min(done - self.stages, most, len(states) - 1))
            for period in {*periods.tolist()} - {0}:
                own = np.flatnonzero(periods == period)
                repeats, more = divmod(micro_batches - done, period)
                moved = (states[-1][:, own] - states[-1 - period][:, own]).mean(0)
                whole[:, self._rest[own]] = states[more - 1 - period][:, own] + moved * (repeats + 1)
            ended[self._rest[periods > 0]] = True
            on = (periods == 0) & self._within(limit, done, micro_batches)
            if not on.all():
                states = deque((state.compress(on, axis=1) for state in states), states.maxlen)
                self._leave(on)
        whole[:, self._rest], ended[self._rest] = self._state(), True
        self._rest, self._parts = np.arange(self._count), parts
        self._set(*np.split(whole, (2 * self.stages - 1,)))
        self._leave(ended)
        self._leave(self._within(limit, micro_batches, micro_batches))
        self.round = micro_batches

    def _leave(self, on: Bools) -> None:
        """Plays these pipelines further, and no others."""
        if not on.all():
            self._rest = self._rest[on]
            self._parts = tuple(part.compress(on, axis=1) for part in self._parts)
            self._set(self._chain.compress(on, axis=1), self.back.compress(on, axis=1))

    def _within(self, limit: float, done: int, micro_batches: int) -> Bools:
        """The pipelines that may end within the limit, after so many of their rounds: by what the micro-batches
        to come, and those under way, need of a stage, and by the way of the last gradient from there."""
        if math.isinf(limit):
            return np.ones(len(self._rest), dtype=bool)
        forward, backward, boundary, *_ = self._parts
        under_way = np.minimum(np.arange(self.stages - 1, -1, -1), done)[:, None]
        end = self.free + (micro_batches - done) * (forward + backward) + under_way * backward
        end[1:] += np.cumsum(backward[:-1] + boundary, axis=0)
        return np.asarray(end.max(0) <= limit * (1 + _ROUNDED))

    def every(self, most: int) -> None:
        """The states after 1 to `most` rounds: [stage, most, pipeline] each."""
        states = [self._state()]
        for index in range(most):
            self._forward()
            self._backward(index, most)
            states.append(self._state())
            if (index + 1) % _LOOK:
                continue
            periods = self._periods(states, min(index + 1 - self.stages, _SHORT))
            if periods.all() and (period := math.lcm(*periods.tolist())) <= index + 1 - self.stages:
                moved = (states[-1] - states[-1 - period]).mean(0)
                for _ in range(index + 1, most):
                    states.append(states[-period] + moved)
                break
        chain, back = np.split(np.stack(states[1:], axis=1), (2 * self.stages - 1,))
        self._set(chain, back)
        self._parts = tuple(part[:, None] for part in self._parts)
        self.round = np.arange(1, most + 1)[:, None]

    def _periods(self, states: Sequence[Floats], most: int) -> Ints:
        """By pipeline the least number of rounds, up to `most`, that moved all its times by one amount; 0 where
        there is none. `states`: the last of so many rounds, and that before them."""
        periods = np.zeros(len(self._rest), dtype=np.int64)
        if most < 1:
            return periods
        last = states[-1]
        near = ALIKE * last[2 * self.stages - 2]
        some = slice(None, None, self.stages)  # few times differ where any do
        moved = last[some] - np.stack([states[-1 - period][some] for period in range(1, most + 1)])
        possible = moved.max(1) - moved.min(1) <= near  # [period - 1, pipeline]
        for period in (possible.any(1).nonzero()[0] + 1).tolist():
            columns = (possible[period - 1] & (periods == 0)).nonzero()[0]
            moved = last[:, columns] - states[-1 - period][:, columns]
            periods[columns[moved.max(0) - moved.min(0) <= near[columns]]] = period
        return periods

    def drained(self) -> Floats:
        """The end of the last pass, after the rounds that only run backward."""
        micro_batches = self.round
        for more in range(self.stages - 1):
            if isinstance(micro_batches, int):
                self._backward(micro_batches + more, micro_batches)
            else:
                self._some_backward(micro_batches + more, micro_batches)
        ends = self.free.max(0)
        seconds = np.full((*ends.shape[:-1], self._count), math.inf)
        seconds[..., self._rest] = ends
        return seconds.reshape((*ends.shape[:-1], *self._leading))

    def _forward(self) -> None:
        """One micro-batch through all stages and boundaries: a running maximum along the chain."""
        chain, (*_, until, start) = self._chain, self._parts
        np.subtract(chain, start, out=chain)
        if self._pairs:
            for before, after in self._pairs:
                np.maximum(after, before, out=after)
        else:
            np.maximum.accumulate(chain, axis=0, out=chain)
        np.add(chain, until, out=chain)

    def _backward(self, index: int, micro_batches: int) -> None:
        """Round `index`: the backward pass that is due on each stage from `first` to `stop`."""
        first, stop = max(0, self.stages - 1 - index), min(self.stages, self.stages + micro_batches - 1 - index)
        if first >= stop:
            return
        free, back, last = self.free, self.back, min(stop, self.stages - 1)
        _, backward, boundary, *_ = self._parts
        np.maximum(free[first:last], back[first:last], out=free[first:last])
        np.add(free[first:stop], backward[first:stop], out=free[first:stop])
        start = max(first, 1)
        sent = back[start - 1 : stop - 1]
        np.maximum(free[start:stop], sent, out=sent)
        np.add(sent, boundary[start - 1 : stop - 1], out=sent)

    def _some_backward(self, index: Ints, micro_batches: Ints) -> None:
        """The same in a curve, whose numbers of rounds differ."""
        ready, (_, backward, boundary, *_) = self.free.copy(), self._parts
        np.maximum(ready[:-1], self.back, out=ready[:-1])
        ready += backward
        behind = np.arange(self.stages - 1, -1, -1)  # stages after each one
        micro = index - behind.reshape((-1,) + (1,) * index.ndim)
        due = (micro >= 0) & (micro < micro_batches)
        np.copyto(self.free, ready, where=due)
        sent = np.maximum(self.free[1:], self.back) + boundary
        np.copyto(self.back, sent, where=due[1:])

    def _state(self) -> Floats:
        return np.concatenate((self._chain, self.back))
