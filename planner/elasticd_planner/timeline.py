"""The 1F1B schedule played out: event by event with every interval, and as an exact recurrence for the search.

A pipeline of p stages and m micro-batches. Stage s runs its passes in the order of 1F1B (PipeDream-flush;
Narayanan et al., 2021): p - s - 1 forward passes, then forward and backward by turns, then the backward
passes that are left. A pass begins once the stage is free and its input is there; a boundary carries one
micro-batch after the other in each direction, beside computation. `simulate` plays these rules with a heap
of events, for times that may differ by micro-batch. `one_f_one_b_seconds` gives the end of the same schedule
for times that depend on the stage alone. Seconds everywhere.

The recurrence. Round r is the forward pass of micro-batch r on all stages and then, on stage s, the backward
pass of micro-batch r - (p - s - 1): whatever these wait for lies in the same chain of stages or in an earlier
round. So a round is one running maximum over stages, whatever the number of micro-batches. In (max, +) it is
linear: once a round moves all times by one amount, so do all that follow (Baccelli et al., Synchronization
and Linearity, 1992, section 3.7), and the rest is added at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from elasticd_planner.value import Value, refuse

Kind = Literal["forward", "backward"]
Floats = npt.NDArray[np.float64]
#: Times by stage, or by pipeline and stage: all pipelines of an array have as many stages.
Times = Sequence[float] | Sequence[Sequence[float]] | Floats

#: Rounds count as alike if their times moved by amounts that differ less than this, relative to the time.
ALIKE = 1e-13


class Work(Value, frozen=True, kw_only=True):
    """One pass on one stage."""

    kind: Kind
    micro_batch: int
    start: float
    stop: float


class StageTimeline(Value, frozen=True, kw_only=True):
    """What a stage did, in order; `end` is when it was done, its overhead included."""

    work: tuple[Work, ...]
    end: float


class Timeline(Value, frozen=True, kw_only=True):
    """One pipeline's step."""

    seconds: float
    stages: tuple[StageTimeline, ...]


def passes(stages: int, stage: int, micro_batches: int) -> Iterator[tuple[Kind, int]]:
    """The passes of `stage` (0 is the first) of a pipeline of `stages`, by micro-batch index."""
    warm = min(micro_batches, stages - stage - 1)
    for index in range(warm):
        yield "forward", index
    for index in range(micro_batches - warm):
        yield "forward", warm + index
        yield "backward", index
    for index in range(micro_batches - warm, micro_batches):
        yield "backward", index


def simulate(
    forward: Sequence[Sequence[float]] | Floats,
    backward: Sequence[Sequence[float]] | Floats,
    boundary: Sequence[float] | Floats = (),
    overhead: Sequence[float] | Floats = (),
) -> Timeline:
    """One step, event by event. forward, backward: [stage][micro-batch]; boundary: of each one between two
    stages, one way; overhead: of each stage after its last pass. Raises Invalid where shapes do not fit."""
    ahead = np.asarray(forward, dtype=np.float64)
    back = np.asarray(backward, dtype=np.float64)
    if ahead.ndim != 2 or ahead.shape != back.shape or 0 in ahead.shape:
        refuse(f"timeline: forward {ahead.shape} and backward {back.shape} must be [stage][micro-batch] alike")
    links = _each(boundary, ahead.shape[0] - 1, "boundary")
    extra = _each(overhead, ahead.shape[0], "overhead")
    if min(ahead.min(), back.min(), links.min(initial=0.0), extra.min(initial=0.0)) < 0:
        refuse("timeline: times must not be negative")
    return _Schedule(ahead, back, links).run(extra)


def _each(given: Sequence[float] | Floats, count: int, name: str) -> Floats:
    times = np.asarray(given, dtype=np.float64)
    if not times.size:
        return np.zeros(count)
    if times.shape != (count,):
        refuse(f"timeline: {name} needs {count} times, not {times.shape}")
    return times


class _Schedule:
    """One simulation under way. An event is the end of a pass, or the arrival of a micro-batch."""

    def __init__(self, forward: Floats, backward: Floats, boundary: Floats) -> None:
        self._times = {"forward": forward, "backward": backward}
        self._boundary = boundary
        self._stages, self._micro_batches = forward.shape
        self._todo = [list(passes(self._stages, s, self._micro_batches))[::-1] for s in range(self._stages)]
        self._here: set[tuple[Kind, int, int]] = {("forward", 0, m) for m in range(self._micro_batches)}
        self._free = [True] * self._stages
        self._carries: dict[tuple[Kind, int], float] = {}
        self._work: list[list[Work]] = [[] for _ in range(self._stages)]
        self._heap: list[tuple[float, int, str, Kind, int, int]] = []
        self._count = 0

    def run(self, overhead: Floats) -> Timeline:
        now = 0.0
        for stage in range(self._stages):
            self._begin(stage, now)
        while self._heap:
            now, _, what, kind, stage, micro = heapq.heappop(self._heap)
            if what == "end":
                self._free[stage] = True
                self._send(kind, stage, micro, now)
            else:
                self._here.add((kind, stage, micro))
            self._begin(stage, now)
        done = tuple(
            StageTimeline(work=tuple(work), end=work[-1].stop + float(extra))
            for work, extra in zip(self._work, overhead, strict=True)
        )
        return Timeline(seconds=max(stage.end for stage in done), stages=done)

    def _begin(self, stage: int, now: float) -> None:
        """The stage's next pass, if it is free and the input is there."""
        todo = self._todo[stage]
        if not self._free[stage] or not todo or (todo[-1][0], stage, todo[-1][1]) not in self._here:
            return
        kind, micro = todo.pop()
        stop = now + float(self._times[kind][stage, micro])
        self._free[stage] = False
        self._work[stage].append(Work(kind=kind, micro_batch=micro, start=now, stop=stop))
        self._push(stop, "end", kind, stage, micro)

    def _send(self, kind: Kind, stage: int, micro: int, now: float) -> None:
        """To the next stage; at the last one, forward turns into backward."""
        if kind == "forward" and stage == self._stages - 1:
            self._here.add(("backward", stage, micro))
            return
        target = stage + 1 if kind == "forward" else stage - 1
        if target < 0:
            return
        link = min(stage, target)
        arrival = max(now, self._carries.get((kind, link), 0.0)) + float(self._boundary[link])
        self._carries[kind, link] = arrival
        self._push(arrival, "arrival", kind, target, micro)

    def _push(self, at: float, what: str, kind: Kind, stage: int, micro: int) -> None:
        heapq.heappush(self._heap, (at, self._count, what, kind, stage, micro))
        self._count += 1


def one_f_one_b_seconds(forward: Times, backward: Times, boundary: Times, micro_batches: int) -> Floats:
    """Seconds of a step of one pipeline, or of each of many with as many stages.

    forward, backward: [..., stage], of one micro-batch; boundary: [..., stage - 1], one way (may be empty for
    none); the result has the leading dimensions. Exact: what `simulate` gives for the same times.
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
    curve = rounds.every(most)
    return curve.drained()


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
        self.round: npt.NDArray[np.int64] | int = 0

    def fill(self, micro_batches: int) -> None:
        """All rounds with a forward pass; those that only repeat are added at once."""
        last = self._state()
        for done in range(1, micro_batches + 1):
            self._forward()
            self._backward(done - 1, micro_batches)
            state = self._state()
            moved = state - last
            # Before that not every stage has run backward in both rounds.
            steady = done > self.stages
            if steady and float(np.max(moved.max(-1) - moved.min(-1))) <= ALIKE * float(state.max()):
                self._add(moved.mean(-1) * (micro_batches - done))
                break
            last = state
        self.round = micro_batches

    def every(self, most: int) -> _Rounds:
        """The states after 1 to `most` rounds, stacked in front."""
        states: list[tuple[Floats, Floats, Floats]] = []
        for index in range(most):
            self._forward()
            self._backward(index, most)
            states.append((self.free, self.ahead, self.back))
        stacked = _Rounds(
            *(np.broadcast_to(t, (most, *t.shape)) for t in (self.forward, self.backward, self.boundary))
        )
        stacked.free, stacked.ahead, stacked.back = (np.stack(parts) for parts in zip(*states, strict=True))
        shape = (most,) + (1,) * self.forward.ndim
        stacked.round = np.arange(1, most + 1).reshape(shape)
        return stacked

    def drained(self) -> Floats:
        """The end of the last pass, after the rounds that only run backward."""
        micro_batches = self.round
        for more in range(self.stages - 1):
            self._backward(micro_batches + more, micro_batches)
        end: Floats = self.free.max(-1)
        return end

    def _forward(self) -> None:
        """One micro-batch through all stages and boundaries: a running maximum along the chain."""
        ready = np.empty(self._until.shape)
        ready[..., 0::2], ready[..., 1::2] = self.free, self.ahead
        ends = self._until + np.maximum.accumulate(ready - self._before, axis=-1)
        self.free, self.ahead = ends[..., 0::2], ends[..., 1::2]

    def _backward(self, index: npt.NDArray[np.int64] | int, micro_batches: npt.NDArray[np.int64] | int) -> None:
        """Round `index`: on each stage the backward pass that is due, if there is one."""
        micro = index - self.behind
        due = (micro >= 0) & (micro < micro_batches)
        begin = self.free.copy()
        begin[..., :-1] = np.maximum(begin[..., :-1], self.back)
        self.free = np.where(due, begin + self.backward, self.free)
        sent = np.maximum(self.free[..., 1:], self.back) + self.boundary
        self.back = np.where(due[..., 1:], sent, self.back)

    def _state(self) -> Floats:
        return np.concatenate((self.free, self.ahead, self.back), axis=-1)

    def _add(self, seconds: Floats) -> None:
        amount = np.asarray(seconds)[..., None]
        self.free, self.ahead, self.back = self.free + amount, self.ahead + amount, self.back + amount
