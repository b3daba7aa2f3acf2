"""The 1F1B schedule played event by event, with every interval: what `schedule_timeline` is compared with.

The rules are those of `elasticd_planner.cost.schedule_timeline`, here for times that may differ by micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from elasticd_planner.cost.schedule import Kind, Pass, passes
from elasticd_planner.cost.schedule_timeline import checked_times, stage_count
from elasticd_planner.numeric import Floats
from elasticd_planner.value import Value, refuse


class Work(Value, frozen=True, kw_only=True):
    """One pass on one stage, through one of its chunks."""

    kind: Kind
    micro_batch: int
    start: float
    stop: float
    chunk: int = 0


class StageTimeline(Value, frozen=True, kw_only=True):
    """What a stage did, in order; `end` is when it was done, its overhead included."""

    work: tuple[Work, ...]
    end: float


class Timeline(Value, frozen=True, kw_only=True):
    """One pipeline's step."""

    seconds: float
    stages: tuple[StageTimeline, ...]


def simulate(
    forward: Sequence[Sequence[float]] | Floats,
    backward: Sequence[Sequence[float]] | Floats,
    boundary: Sequence[float] | Floats = (),
    overhead: Sequence[float] | Floats = (),
    *,
    chunks: int = 1,
) -> Timeline:
    """One step, event by event. forward, backward: [place][micro-batch], where a place is a stage, or with
    `chunks` a chunk, in the order in which a micro-batch meets them; boundary: of each one between two places,
    one way; overhead: of each stage after its last pass. Raises Invalid where shapes do not fit."""
    ahead = np.asarray(forward, dtype=np.float64)
    back = np.asarray(backward, dtype=np.float64)
    if ahead.ndim != 2 or ahead.shape != back.shape or 0 in ahead.shape:
        refuse(f"timeline: forward {ahead.shape} and backward {back.shape} must be [stage][micro-batch] alike")
    stages = stage_count(ahead.shape[0], chunks)
    links = checked_times(boundary, ahead.shape[0] - 1, "boundary")
    extra = checked_times(overhead, stages, "overhead")
    if min(ahead.min(), back.min(), links.min(initial=0.0), extra.min(initial=0.0)) < 0:
        refuse("timeline: times must not be negative")
    return _Schedule(ahead, back, links, stages).run(extra)


class _Schedule:
    """One simulation under way. An event is the end of a pass, or the arrival of a micro-batch. Chunk c of
    stage s is place c x stages + s."""

    def __init__(self, forward: Floats, backward: Floats, boundary: Floats, stages: int) -> None:
        self._times = {"forward": forward, "backward": backward}
        self._boundary = boundary
        self._stages, (self._places, self._micro_batches) = stages, forward.shape
        chunks = self._places // stages
        self._todo = [list(passes(stages, s, self._micro_batches, chunks))[::-1] for s in range(stages)]
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
            now, _, what, kind, place, micro = heapq.heappop(self._heap)
            if what == "end":
                self._free[place % self._stages] = True
                self._send(kind, place, micro, now)
            else:
                self._here.add((kind, place, micro))
            self._begin(place % self._stages, now)
        done = tuple(
            StageTimeline(work=tuple(work), end=work[-1].stop + float(extra))
            for work, extra in zip(self._work, overhead, strict=True)
        )
        return Timeline(seconds=max(stage.end for stage in done), stages=done)

    def _place(self, stage: int, coming: Pass) -> int:
        return coming.chunk * self._stages + stage

    def _begin(self, stage: int, now: float) -> None:
        """The stage's next pass, if it is free and the input is there."""
        todo = self._todo[stage]
        if not self._free[stage] or not todo:
            return
        kind, micro, chunk = todo[-1]
        place = self._place(stage, todo[-1])
        if (kind, place, micro) not in self._here:
            return
        todo.pop()
        stop = now + float(self._times[kind][place, micro])
        self._free[stage] = False
        self._work[stage].append(Work(kind=kind, micro_batch=micro, start=now, stop=stop, chunk=chunk))
        self._push(stop, "end", kind, place, micro)

    def _send(self, kind: Kind, place: int, micro: int, now: float) -> None:
        """To the next place; at the last one, forward turns into backward."""
        if kind == "forward" and place == self._places - 1:
            self._here.add(("backward", place, micro))
            return
        target = place + 1 if kind == "forward" else place - 1
        if target < 0:
            return
        border = min(place, target)
        link = border % self._stages  # all chunks of two stages go over one
        arrival = max(now, self._carries.get((kind, link), 0.0)) + float(self._boundary[border])
        self._carries[kind, link] = arrival
        self._push(arrival, "arrival", kind, target, micro)

    def _push(self, at: float, what: str, kind: Kind, place: int, micro: int) -> None:
        heapq.heappush(self._heap, (at, self._count, what, kind, place, micro))
        self._count += 1
