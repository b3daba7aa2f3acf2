"""A recorded run decided again, by the real machine and the real planner on the recording's own clock.

Theory of operation. What the leader heard is fed to the machine at the times at which it heard it. The
planner is asked anew whenever the machine asks; its answer comes when it came then. What the machine notes is
compared with what it noted then: with the settings of the recording it must be the same.

With other settings (`detect`, `policy`) the decisions may be others. What the workers measured stays true of
the devices until a plan is proposed: after that nobody knows what they would have done, and the replay ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.problem import JobProblem
from elasticd_planner.value import Value

from elasticd import recording
from elasticd.machines.coordinator import machine
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.events import (
    Configured,
    CoordinatorNote,
    CoordinatorTick,
    Event,
    Planned,
    RequestPlan,
)
from elasticd.recording import Line
from elasticd.simulator.planning import Planner

#: Seconds between ticks where settings are others: what time asks for then was not recorded.
TICK_SECONDS = 0.1
#: Notes that are no decisions: they repeat what was heard.
_HEARD = frozenset({"node_up", "node_down", "prepared", "swapped", "joined", "chaos", "configured", "drained"})


class Decision(Value, frozen=True, kw_only=True):
    """Something that the leader noted, at so many seconds from the recording's beginning."""

    seconds: float
    kind: str
    job: str
    text: str


class Replayed(Value, frozen=True, kw_only=True):
    """The decisions that were made again, beside the recorded ones. `step`: the newest step that was judged, of
    any job;
    events: how many were heard; ended: why the rest could not be decided, or nothing."""

    decisions: tuple[Decision, ...]
    recorded: tuple[Decision, ...]
    step: int
    events: int
    ended: str = ""

    @property
    def differs(self) -> int | None:
        """The index of the first decision that is another one; None where all are the same."""
        for index, (decision, was) in enumerate(zip(self.decisions, self.recorded, strict=False)):
            if (decision.kind, decision.job, decision.text) != (was.kind, was.job, was.text):
                return index
        short = min(len(self.decisions), len(self.recorded))
        return None if len(self.decisions) == len(self.recorded) else short


def replay(
    lines: Sequence[Line],
    planner: Planner,
    *,
    detect: DetectSettings | None = None,
    policy: PolicySettings | None = None,
) -> Replayed:
    """Decides a recording again, with other settings where they are given. Raises `msgspec.DecodeError`."""
    again = _Again(planner, lines[0].at, detect, policy)
    recorded = []
    for line in lines:
        if line.what == "told":
            note = line.note()
            if note.kind not in _HEARD:
                recorded.append(_decision(note, line.at - lines[0].at))
        elif line.what == "began":
            again.begin(line.state(), line.at)
        elif not again.ended:
            again.hear(line.event(), line.at)
    return Replayed(
        decisions=tuple(again.decisions),
        recorded=tuple(recorded),
        step=max((job.detection.rates.step for job in again.state.jobs.values()), default=-1),
        events=again.events,
        ended=again.ended,
    )


def _decision(note: CoordinatorNote, seconds: float) -> Decision:
    return Decision(seconds=round(seconds, 6), kind=note.kind, job=note.job, text=note.text)


class _Again:
    """The machine as it goes through the recording."""

    state: CoordinatorState

    def __init__(
        self, planner: Planner, start: float, detect: DetectSettings | None, policy: PolicySettings | None
    ) -> None:
        self._planner, self._start = planner, start
        self._detect, self._policy = detect, policy
        self._asked: dict[tuple[str, int], JobProblem] = {}
        self._due: list[tuple[float, str, int]] = []
        self._last = start
        self.decisions: list[Decision] = []
        self.events = 0
        self.ended = ""

    @property
    def _other(self) -> bool:
        return self._detect is not None or self._policy is not None

    def begin(self, state: CoordinatorState, at: float) -> None:
        settings = msgspec.structs.replace(
            state.settings,
            detect=self._detect or state.settings.detect,
            policy=self._policy or state.settings.policy,
        )
        self.state = msgspec.structs.replace(state, settings=settings)
        self._last = at
        self._due.clear()
        for job in state.jobs.values():
            if job.planning.asked is not None:
                self._ask(job.job, job.planning.asked.token, job.planning.asked.problem, at)

    def hear(self, event: Event, at: float) -> None:
        self.events += 1
        if isinstance(event, Planned):
            problem = self._asked.get((event.job, event.token))
            if self._other or problem is None:
                return  # those that are asked now are answered in their own time
            if not event.error:
                event = msgspec.structs.replace(event, answer=self._planner.answer(problem))
        elif isinstance(event, Configured) and self._other:
            return
        if self._other:
            self._wait(at)
        if not self.ended:
            self._step(event, at)

    def _wait(self, until: float) -> None:
        """Plays the ticks up to `until`, with settings that are not those of the recording."""
        while self._last + TICK_SECONDS < until and not self.ended:
            self._last += TICK_SECONDS
            for due in [due for due in self._due if due[0] <= self._last]:
                self._due.remove(due)
                answer = self._planner.answer(self._asked[due[1:]])
                self._step(Planned(job=due[1], token=due[2], answer=answer), self._last)
            self._step(CoordinatorTick(), self._last)

    def _step(self, event: Event, at: float) -> None:
        before = {name: job.proposal for name, job in self.state.jobs.items()}
        self.state, effects = machine.step(self.state, event, at)
        for note in recording.notes(effects):
            if note.kind not in _HEARD:
                self.decisions.append(_decision(note, at - self._start))
        for effect in effects:
            if isinstance(effect, RequestPlan):
                self._ask(effect.job, effect.token, effect.problem, at)
        proposed = any(
            job.proposal is not None and before.get(name) is not job.proposal
            for name, job in self.state.jobs.items()
        )
        if self._other and proposed:
            self.ended = "a plan is proposed: from here on nobody knows what the workers would have measured"

    def _ask(self, job: str, token: int, problem: JobProblem, at: float) -> None:
        self._asked[job, token] = problem
        if self._other:
            self._due.append((at + self._planner.seconds(problem), job, token))
