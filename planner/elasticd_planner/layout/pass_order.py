"""The order of the passes and messages of a pipeline, and the time of each pass.

One run of all stages gives both. A stage runs its passes in the order of its schedule, each as soon as the
stage is free and the input of the pass is there.

*The order.* A device may carry out what it was given one after the other, as if in one queue. A message then
holds up whatever its rank launched after it, passes too, until its other end has come to it. `stage_order`
gives an order that comes to its end even so: one order of all passes and messages of a pipeline, of which each
stage carries out its own. The first of them that is not over can always go on.

In that run all passes take equally long. A message is launched at both ends at once, when its receiver is ready
for it. It is ready for an activation before the pass that needs it, since only a header says its size, and for
a gradient up to `AHEAD` passes earlier: so gradients travel while their receiver runs other passes. A stage
whose message waits for its receiver runs no pass meanwhile, unless all stages wait for each other. In a plain
pipeline they never do. Around an interleaved one they may: a stage then launches its message after some more
passes, when its receiver needs it. Lanes with rows of their own each have their part of one order, too.

*The times.* `timed_passes` gives those of passes that take what they take. Messages hold up nothing: a border
carries one micro-batch after the other in each direction, beside the passes. An interleaved pipeline has one
border more, from the last stage to the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from elasticd_planner.value import refuse

#: (stages, stage, micro-batches, chunks) -> (kind, micro-batch, chunk) of each pass: `cost.schedule.passes`.
Schedule = Callable[[int, int, int, int], Iterator[tuple[str, int, int]]]

#: A receipt is launched this many passes at most before the one that waits for it.
AHEAD = 2


class Act(NamedTuple):
    """A pass of a stage, or one end of a message with an adjacent stage: of an activation where `kind` is
    "forward", of its gradient where it is "backward". Or, of a lane that has no micro-batch in a row, its part
    in the passes of other lanes: its experts serve."""

    what: Literal["receive", "pass", "send", "serve"]
    kind: str
    micro_batch: int  #: where the lane serves, the row
    chunk: int  #: that the pass goes through: of this stage, whichever stage the message goes to


class PassTime(NamedTuple):
    """When a pass of a stage runs, from the begin of the step, in the unit of the times that are given."""

    kind: str
    micro_batch: int
    chunk: int
    start: float
    stop: float


@lru_cache(maxsize=256)  # a packed job has other numbers of rows in each step
def stage_order(
    schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> tuple[Act, ...]:
    """All acts of one stage in a step, in their order.

    No pass is between the receipt of an activation and its own pass.

    Args:
        schedule: the order of the passes of each stage.
        stages: of the pipeline.
        stage: whose acts; 0 is the first.
        micro_batches: of the pipeline in the step.
        chunks: of each stage.

    Raises:
        ValueError: the passes of this schedule wait for each other.
    """
    return _orders(schedule, stages, micro_batches, chunks)[stage]


def acts_of_rows(acts: Iterable[Act], rows: Sequence[int], *, serves: bool = False) -> Iterator[Act]:
    """Of the acts for all rows of a pipeline those of a lane that has a part of these rows alone, which count
    as its micro-batches. `serves`: it serves in the passes of others."""
    places = {row: place for place, row in enumerate(rows)}
    for act in acts:
        if act.micro_batch in places:
            yield act._replace(micro_batch=places[act.micro_batch])
        elif serves and act.what == "pass":
            yield act._replace(what="serve")


def timed_passes(
    schedule: Schedule,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    boundary: Sequence[float] = (),
    chunks: int = 1,
) -> list[list[PassTime]]:
    """When the passes of each stage run, in the order of the stage. Whole numbers give whole numbers.

    Args:
        schedule: the order of the passes of each stage.
        forward: times of forward passes [place, micro-batch]. A place is a chunk of a stage; places are in the
            order in which a micro-batch meets them.
        backward: times of backward passes, likewise.
        boundary: times of a message from each place to the next one, and of its gradient back; empty: zeros.
        chunks: of each stage.

    Raises:
        Invalid: the times do not fit each other.
        ValueError: the passes of this schedule wait for each other.
    """
    places, counts = len(forward), {len(times) for times in (*forward, *backward)}
    if chunks < 1 or places % chunks or (chunks > 1 and places == chunks):
        refuse(f"timeline: {places} chunks of layers are not {chunks} on each of two stages or more")
    if len(backward) != places or len(counts) != 1 or 0 in counts:
        refuse(f"timeline: {places} forward and {len(backward)} backward of {sorted(counts)} micro-batches")
    if boundary and len(boundary) != places - 1:
        refuse(f"timeline: boundary needs {places - 1} times, not {len(boundary)}")
    times = {"forward": forward, "backward": backward}
    run = _Run(schedule, times, boundary or [0] * (places - 1), chunks, begin=0 * forward[0][0])
    run.finish()
    return run.times


@lru_cache(maxsize=4)  # of all stages
def _orders(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> tuple[tuple[Act, ...], ...]:
    alike = [[1] * micro_batches] * (stages * chunks)
    run = _QueueRun(schedule, {"forward": alike, "backward": alike}, [0] * (stages * chunks - 1), chunks)
    run.finish()
    return tuple(map(tuple, run.acts))


class _Run:
    """The run of all stages. Their messages go beside their passes."""

    times: list[list[PassTime]]  # of the passes of each stage

    def __init__(
        self,
        schedule: Schedule,
        seconds: Mapping[str, Sequence[Sequence[float]]],
        boundary: Sequence[float],
        chunks: int,
        begin: float = 0,
    ) -> None:
        """
        Args:
            schedule: the order of the passes of each stage.
            seconds: of passes, by kind [place, micro-batch].
            boundary: of a message, by the earlier of its two places.
            chunks: of each stage.
            begin: of the step.
        """
        stages, count = (len(boundary) + 1) // chunks, len(seconds["forward"][0])
        self._passes = passes = [list(schedule(stages, stage, count, chunks)) for stage in range(stages)]
        self._stages, self._seconds, self._boundary, self._last = stages, seconds, boundary, len(boundary)
        self._at = [{each: at for at, each in enumerate(listed)} for listed in passes]
        self._done = [0] * stages  # passes
        self._time = [begin] * stages  # at the end of the last pass
        self._came: list[dict[int, float]] = [{} for _ in passes]  # when, by number of the pass that needs it
        self._carries: dict[tuple[str, int], float] = {}  # until when, by kind and boundary
        self._ready: list[tuple[float, int, int, int]] = []  # (end, -place, stage, number) of what can run
        self.times = [[] for _ in passes]

    def finish(self) -> None:
        """Runs all passes."""
        for stage in range(self._stages):
            self._look(stage)
        for _ in range(sum(map(len, self._passes))):
            self._pass(self._next())

    def _next(self) -> int:
        """The stage whose pass ends first; of those the one that a micro-batch comes to last."""
        while self._ready:
            _, _, stage, number = heappop(self._ready)
            if number == self._done[stage]:
                return stage
        return self._stuck()

    def _stuck(self) -> int:
        raise ValueError("the passes of this schedule wait for each other")

    def _pass(self, stage: int) -> None:
        number = self._done[stage]
        kind, index, chunk = self._passes[stage][number]
        place = chunk * self._stages + stage
        start = max(self._time[stage], self._came[stage].get(number, 0))
        end = self._time[stage] = start + self._seconds[kind][place][index]
        self._done[stage] = number + 1
        self.times[stage].append(PassTime(kind, index, chunk, start, end))
        to = place + 1 if kind == "forward" else place - 1
        if 0 <= to <= self._last:
            chunk, other = divmod(to, self._stages)
            self._send(kind, index, place, to, self._at[other][kind, index, chunk])
        self._look(stage)

    def _send(self, kind: str, index: int, place: int, to: int, number: int) -> None:
        """Sends the result of a pass to another place, for the pass of this number there."""
        border, stage = min(place, to), to % self._stages
        boundary = kind, border % self._stages  # all chunks of two stages go over one
        made = self._time[place % self._stages]
        came = max(made, self._carries.get(boundary, 0)) + self._boundary[border]
        self._came[stage][number] = self._carries[boundary] = came
        if number == self._done[stage]:
            self._look(stage)

    def _input(self, stage: int) -> float | None:
        """When what the next pass of a stage needs is there; None: it is not."""
        number = self._done[stage]
        kind, _, chunk = self._passes[stage][number]
        first = 0 if kind == "forward" else self._last
        return 0 if chunk * self._stages + stage == first else self._came[stage].get(number)

    def _look(self, stage: int) -> None:
        """Queues the next pass of a stage if it can run."""
        number = self._done[stage]
        if number < len(self._passes[stage]) and (came := self._input(stage)) is not None:
            kind, index, chunk = self._passes[stage][number]
            place = chunk * self._stages + stage
            end = max(self._time[stage], came) + self._seconds[kind][place][index]
            heappush(self._ready, (end, -place, stage, number))


class _QueueRun(_Run):
    """The run where a message holds up the passes of its sender, until both of its ends launch it."""

    acts: list[list[Act]]  # of each stage

    def finish(self) -> None:
        """Runs all passes."""
        self.acts = [[] for _ in self._passes]
        # What a stage has made and not sent, by kind and adjacent stage: the number of the pass that needs it,
        # micro-batch and own chunk, and when it was made.
        self._made: list[dict[tuple[str, int], deque[tuple[int, int, int, float]]]] = [{} for _ in self._passes]
        self._waiting = [0] * self._stages  # how many messages that is
        super().finish()

    def _pass(self, stage: int) -> None:
        self.acts[stage].append(Act("pass", *self._passes[stage][self._done[stage]]))
        super()._pass(stage)
        self._launch_around(stage)

    def _send(self, kind: str, index: int, place: int, to: int, number: int) -> None:
        chunk, stage = divmod(place, self._stages)
        waiting = self._made[stage].setdefault((kind, to % self._stages), deque())
        waiting.append((number, index, chunk, self._time[stage]))
        self._waiting[stage] += 1

    def _look(self, stage: int) -> None:
        if not self._waiting[stage]:
            super()._look(stage)

    def _stuck(self) -> int:
        """All stages wait for each other: a message is launched after a pass more."""
        late = []
        for stage, (listed, done) in enumerate(zip(self._passes, self._done, strict=True)):
            if done < len(listed) and (came := self._made_for(stage)) is not None:
                late.append((max(self._time[stage], came), -listed[done][2], -stage))
        if not late:
            return super()._stuck()
        stage = -min(late)[2]
        self._launch((stage - 1) % self._stages, late=stage)
        return stage

    def _made_for(self, stage: int) -> float | None:
        """When what the next pass of a stage needs was made, if it is there or an activation; else None."""
        number, came = self._done[stage], self._input(stage)
        if came is None and self._passes[stage][number][0] == "forward":
            waiting = self._made[(stage - 1) % self._stages].get(("forward", stage))
            return waiting[0][3] if waiting and waiting[0][0] == number else None
        return came

    def _launch_around(self, stage: int) -> None:
        """Launches all that can be, after a pass of a stage."""
        around = deque([stage])
        while around:
            free = around.popleft()
            for each in (free, (free + 1) % self._stages, (free - 1) % self._stages):
                if self._waiting[each]:
                    self._launch(each)
                    if not self._waiting[each]:
                        self._look(each)
                        around.append(each)

    def _launch(self, stage: int, late: int | None = None) -> None:
        """Launches what a stage has made for receivers that are ready; `late` is, whatever waits there."""
        for (kind, to), waiting in self._made[stage].items():
            while waiting and self._takes(to, waiting[0][0], late=late == to):
                number, index, chunk, time = waiting.popleft()
                self._waiting[stage] -= 1
                self.acts[stage].append(Act("send", kind, index, chunk))
                self.acts[to].append(Act("receive", *self._passes[to][number]))
                self._came[to][number] = time
                self._look(to)

    def _takes(self, stage: int, number: int, *, late: bool) -> bool:
        """Returns True if a stage is ready to receive what it needs for a pass. In a plain pipeline it sends
        what it has first, so that this need not wait for a header; in an interleaved one that would cost
        time."""
        kind, index, chunk = self._passes[stage][number]
        ahead = number - self._done[stage]
        if kind == "forward":
            return ahead == 0 and (late or self._last >= self._stages or not self._waiting[stage])
        return ahead <= AHEAD and self._at[stage]["forward", index, chunk] < self._done[stage]
