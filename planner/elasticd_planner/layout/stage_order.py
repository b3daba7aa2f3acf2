"""The order in which the stages of a pipeline launch their messages and run their passes.

A device may carry out what it was given one after the other, as if in one queue. A message then holds up
whatever its rank launched after it, passes too, until its other end has come to it. `stage_order` gives an
order that comes to its end even so: one order of all passes and messages of a pipeline, of which each stage
carries out its own. The first of them that is not over can always go on.

That one order comes from a simulated run in which all passes take equally long. A message is launched at both
ends at once, when its receiver is ready for it. It is ready for an activation before the pass that needs it,
since only a header says its size, and for a gradient up to `AHEAD` passes earlier: so gradients travel while
their receiver runs other passes. A stage whose message waits for its receiver runs no pass meanwhile, unless
all stages wait for each other. In a plain pipeline they never do. Around an interleaved one they may: a stage
then launches its message after some more passes, when its receiver needs it.

Lanes with rows of their own each have their part of one order, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal, NamedTuple

#: (stages, stage, micro-batches, chunks) -> (kind, micro-batch, chunk) of each pass: `cost.schedule.passes`.
Schedule = Callable[[int, int, int, int], Iterator[tuple[str, int, int]]]

#: A receipt is launched this many passes at most before the one that waits for it.
AHEAD = 2


class Act(NamedTuple):
    """A pass of a stage, or one end of a message with an adjacent stage: of an activation where `kind` is
    "forward", of its gradient where it is "backward"."""

    what: Literal["receive", "pass", "send"]
    kind: str
    micro_batch: int
    chunk: int  #: that the pass goes through: of this stage, whichever stage the message goes to


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


def acts_of_rows(acts: Iterable[Act], rows: Sequence[int]) -> Iterator[Act]:
    """Of the acts for all rows of a pipeline those of a lane that has a part of these rows alone, which count
    as its micro-batches."""
    places = {row: place for place, row in enumerate(rows)}
    for act in acts:
        if act.micro_batch in places:
            yield act._replace(micro_batch=places[act.micro_batch])


def at_once(acts: Iterable[Act]) -> Iterator[Act]:
    """These acts in the order for messages that hold up nothing: what a pass has made is sent at once, and an
    activation is received, its header awaited, right before its pass."""
    listed = list(acts)
    messages = {act for act in listed if act.what != "pass"}
    for act in listed:
        if act.what == "pass":
            receipt, message = act._replace(what="receive"), act._replace(what="send")
            if act.kind == "forward" and receipt in messages:
                yield receipt
            yield act
            if message in messages:
                yield message
        elif (act.what, act.kind) == ("receive", "backward"):
            yield act


@lru_cache(maxsize=4)  # of all stages
def _orders(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> tuple[tuple[Act, ...], ...]:
    passes = [list(schedule(stages, stage, micro_batches, chunks)) for stage in range(stages)]
    return _Run(passes, chunks).acts()


class _Run:
    """The run of all stages."""

    def __init__(self, passes: Sequence[Sequence[tuple[str, int, int]]], chunks: int) -> None:
        self._passes, self._stages, self._turns = passes, len(passes), len(passes) * chunks
        self._at = [{each: at for at, each in enumerate(listed)} for listed in passes]
        self._acts: list[list[Act]] = [[] for _ in passes]
        self._done = [0] * self._stages  # passes
        self._time = [0] * self._stages  # at the end of the last pass
        # What a stage has made and not sent: by kind and adjacent stage, each with the time when it was made.
        self._made: list[dict[tuple[str, int], deque[tuple[int, int, int]]]] = [{} for _ in passes]
        self._came: list[dict[tuple[str, int, int], int]] = [{} for _ in passes]  # when, by pass that needs it
        self._ready: list[tuple[int, int, int, int]] = []  # (end, -turn, stage, number) of passes that can run

    def acts(self) -> tuple[tuple[Act, ...], ...]:
        """By stage."""
        for stage in range(self._stages):
            self._look(stage)
        while any(self._done[stage] < len(listed) for stage, listed in enumerate(self._passes)):
            stage = self._next()
            self._pass(stage)
            self._look(stage)
            self._launch_around(stage)
        return tuple(map(tuple, self._acts))

    def _next(self) -> int:
        """The stage whose pass ends first; of those the one that a micro-batch comes to last."""
        while self._ready:
            _, _, stage, number = heappop(self._ready)
            if number == self._done[stage]:
                return stage
        late = []  # all stages wait for each other: a message is launched after a pass more
        for stage, (listed, done) in enumerate(zip(self._passes, self._done, strict=True)):
            if done < len(listed) and (came := self._came_of(stage)) is not None:
                late.append((max(self._time[stage], came), -listed[done][2], -stage))
        if not late:
            raise ValueError("the passes of this schedule wait for each other")
        stage = -min(late)[2]
        self._launch((stage - 1) % self._stages, late=stage)
        return stage

    def _came_of(self, stage: int) -> int | None:
        """When what the next pass of a stage needs was made; None: it was not."""
        kind, index, chunk = key = self._passes[stage][self._done[stage]]
        turn = chunk * self._stages + stage
        if turn == (0 if kind == "forward" else self._turns - 1):
            return 0
        if key in self._came[stage] or kind == "backward":
            return self._came[stage].get(key)
        waiting = self._made[(stage - 1) % self._stages].get((kind, stage))
        return waiting[0][2] if waiting and waiting[0][:2] == (index, chunk) else None

    def _pass(self, stage: int) -> None:
        kind, index, chunk = self._passes[stage][self._done[stage]]
        self._time[stage] = max(self._time[stage], self._came[stage].pop((kind, index, chunk), 0)) + 1
        self._done[stage] += 1
        self._acts[stage].append(Act("pass", kind, index, chunk))
        turn = chunk * self._stages + stage + (1 if kind == "forward" else -1)
        if 0 <= turn < self._turns:
            waiting = self._made[stage].setdefault((kind, turn % self._stages), deque())
            waiting.append((index, turn // self._stages, self._time[stage]))

    def _launch_around(self, stage: int) -> None:
        """Launches all that can be, after a pass of a stage."""
        around = deque([stage])
        while around:
            free = around.popleft()
            for each in (free, (free + 1) % self._stages, (free - 1) % self._stages):
                waited = self._waits(each)
                self._launch(each)
                if waited and not self._waits(each):
                    self._look(each)
                    around.append(each)

    def _launch(self, stage: int, late: int | None = None) -> None:
        """Launches what a stage has made, as far as its receivers are ready; `late` is one of those although it
        has messages that wait."""
        for (kind, to), waiting in self._made[stage].items():
            while waiting and self._takes(to, kind, *waiting[0][:2], late=late == to):
                index, chunk, time = waiting.popleft()
                mine = chunk * self._stages + to + (-1 if kind == "forward" else 1)
                self._acts[stage].append(Act("send", kind, index, mine // self._stages))
                self._acts[to].append(Act("receive", kind, index, chunk))
                self._came[to][kind, index, chunk] = time
                self._look(to)

    def _waits(self, stage: int) -> bool:
        """Whether a message of a stage waits for its receiver."""
        return any(self._made[stage].values())

    def _takes(self, stage: int, kind: str, index: int, chunk: int, *, late: bool) -> bool:
        """Whether a stage is ready to receive what it needs for a pass. In a plain pipeline it sends what it
        has first, so that this need not wait for a header; in an interleaved one that would cost time."""
        ahead = self._at[stage][kind, index, chunk] - self._done[stage]
        if kind == "forward":
            return ahead == 0 and (late or self._turns > self._stages or not self._waits(stage))
        return ahead <= AHEAD and self._at[stage]["forward", index, chunk] < self._done[stage]

    def _look(self, stage: int) -> None:
        """Whether the next pass of a stage can run."""
        if self._waits(stage) or self._done[stage] == len(self._passes[stage]):
            return
        kind, _, chunk = key = self._passes[stage][self._done[stage]]
        turn = chunk * self._stages + stage
        first = turn == (0 if kind == "forward" else self._turns - 1)
        if first or key in self._came[stage]:
            end = max(self._time[stage], self._came[stage].get(key, 0)) + 1
            heappush(self._ready, (end, -turn, stage, self._done[stage]))
