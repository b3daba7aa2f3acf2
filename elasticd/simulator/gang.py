"""What the workers of a job do together: train step by step, vote, and carry a switch through.

Every worker's part is decided by its own machine (`elasticd.machines.switch`); here are the collectives
between them, which complete when all members have come, and the time that all of it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticd_planner.plan import Plan
from elasticd_planner.profiles import ModelProfile

from elasticd.machines import switch as sw
from elasticd.messages import Doubt, Finished, Kept, Prepared, Refused, Report, Swapped
from elasticd.records import Proposal
from elasticd.simulator.engine import Engine
from elasticd.simulator.moving import Move, move
from elasticd.simulator.nodes import SimulationError, Worker
from elasticd.simulator.scenario import Times
from elasticd.simulator.truth import Truth


@dataclass(frozen=True, kw_only=True)
class Began:
    """A stretch of training as it began: when, at which speeds, with which samples. What happens to a device
    while a step is under way shows in the next one."""

    now: float
    speeds: Mapping[str, float]
    profile: ModelProfile
    tokens: int


#: Called after each stretch of training: how it began, and its steps.
Told = Callable[[Began, int], None]


class Gang:
    """The workers of the job. `plan` is in force, `step` updates were applied. The script says by `limit` how
    many steps may be counted without playing them (0: play the next one). `cut`: nodes that nobody reaches;
    what all members do together waits for them. Once `broken`, nothing completes any more."""

    def __init__(
        self,
        engine: Engine,
        truth: Truth,
        times: Times,
        *,
        steps: int | None,
        samples: int,
        limit: Callable[[float], int],
        trained: Told,
        starved: Callable[[str], None],
    ) -> None:
        self._engine, self._truth, self._times = engine, truth, times
        self._steps, self._samples = steps, samples
        self._limit, self._trained, self._starved = limit, trained, starved
        self.pause_seconds = 0.0
        self.bytes_moved = 0
        self.switches = 0
        self.cut: set[str] = set()
        self.life = 0
        self.start(0)

    def start(self, step: int) -> None:
        """Processes that know nothing but the checkpoint of `step`."""
        self.life += 1
        self.step = step
        self.workers: dict[str, Worker] = {}
        self.plan: Plan | None = None
        self.over_at: float | None = None
        self.stopped = ""
        self.broken = False
        self._paused_at: float | None = None
        self._standing: dict[int, set[str]] = {}
        self._moving: dict[int, set[str]] = {}
        self._moves: dict[int, Move] = {}
        self._said: dict[int, dict[str, bool]] = {}
        self._waiting: list[Callable[[], None]] = []

    def together(self, seconds: float, done: Callable[[], None]) -> None:
        """What the members do together and end after `seconds`, if all of them can be reached then."""
        life = self.life

        def due() -> None:
            if self.life != life or self.broken:
                return
            if self.stalled:
                self._waiting.append(due)
            else:
                done()

        self._engine.after(seconds, due)

    @property
    def stalled(self) -> bool:
        """Whether a member is on a node that nobody reaches."""
        members = self.plan.members if self.plan is not None else self.workers
        return bool(self.cut) and any(name.rpartition("/")[0] in self.cut for name in members)

    def needs(self, node: str) -> bool:
        """Whether a member, or one that is about to be, is on the node."""
        proposals = {
            w.proposal.number: w.proposal.plan for w in self.workers.values() if w.proposal is not None
        }
        plans = [plan for plan in (self.plan, *proposals.values()) if plan is not None]
        names = {name for plan in plans for name in plan.members} if plans else self.workers
        return any(name.rpartition("/")[0] == node for name in names) or not plans

    def reached(self) -> None:
        """A node can be reached again: what waited for it goes on."""
        waiting, self._waiting = self._waiting, []
        for due in waiting:
            self._engine.after(self._times.message, due)

    # -- what the machines ask for ---------------------------------------------------------------------------

    def run(self, worker: Worker, effect: sw.Effect) -> None:
        self.workers.setdefault(worker.device, worker)
        match effect:
            case sw.Prepare(number=number):
                self.together(self._times.prepare, lambda: self._prepared(worker, number))
            case sw.Cancel(number=number):
                self._left(worker, number)
            case sw.Move(number=number):
                self._enter(worker, number)
            case sw.Say(number=number, ok=ok):
                self._say(worker, number, ok)
            case sw.ReportPrepared(number=number):
                worker.say(Prepared(number=number))
            case sw.ReportRefused(number=number, reason=reason):
                worker.say(Refused(number=number, reason=reason))
            case sw.ReportSwapped(number=number):
                worker.say(self._swapped(worker, number))
            case sw.ReportKept(number=number, reason=reason):
                worker.say(Kept(number=number, step=self.step, reason=reason))
            case sw.ReportDoubt(number=number, reason=reason):
                worker.say(Doubt(number=number, step=self.step, reason=reason))
            case sw.Stop(reason=reason):
                self.stopped = self.stopped or reason
                self.end()
            case _:
                pass  # Swap and DropOld: the plan in force changes for all at once, in `_gathered`

    def _all(self, worker: Worker, number: int) -> tuple[Worker, ...]:
        """The members of the transition group, in rank order of old and new."""
        proposal = self._proposal(worker, number)
        old = proposal.old.members if proposal.old is not None else ()
        names = dict.fromkeys((*old, *proposal.plan.members))
        return tuple(self.workers[name] for name in names if name in self.workers)

    @staticmethod
    def _proposal(worker: Worker, number: int) -> Proposal:
        proposal = worker.proposal
        if proposal is None or proposal.number != number:
            raise SimulationError(f"{worker.device} switches to {number}, which it was not told of")
        return proposal

    def _size(self, worker: Worker, number: int) -> int:
        proposal = self._proposal(worker, number)
        old = proposal.old.members if proposal.old is not None else ()
        return len({*old, *proposal.plan.members})

    def _prepared(self, worker: Worker, number: int) -> None:
        """The transition group stands once all of its members are ready."""
        if worker.state.proposal != number or self.over:
            return
        ready = self._standing.setdefault(number, set())
        ready.add(worker.device)
        if len(ready) == self._size(worker, number):
            for member in self._all(worker, number):
                member.feed(sw.Stands(number=number))

    def _left(self, worker: Worker, number: int) -> None:
        for group in (self._standing, self._moving):
            group.get(number, set()).discard(worker.device)
        self._said.get(number, {}).pop(worker.device, None)

    def _enter(self, worker: Worker, number: int) -> None:
        """State moves once all are there."""
        there = self._moving.setdefault(number, set())
        there.add(worker.device)
        if len(there) < self._size(worker, number):
            return
        proposal = self._proposal(worker, number)
        found = move(self._truth.profile, self._truth.cluster, proposal.old, proposal.plan)
        self._moves[number] = found
        pause = self._times.pause if proposal.old is not None else 0.0
        members = self._all(worker, number)

        def moved() -> None:
            for member in members:
                member.feed(sw.Moved(number=number))

        self.together(found.seconds + pause, moved)

    def _say(self, worker: Worker, number: int, ok: bool) -> None:
        said = self._said.setdefault(number, {})
        said[worker.device] = ok
        if len(said) < self._size(worker, number):
            return
        members, proposal = self._all(worker, number), self._proposal(worker, number)
        self.together(self._times.message, lambda: self._gathered(proposal, members, dict(said)))

    def _gathered(self, proposal: Proposal, members: tuple[Worker, ...], said: dict[str, bool]) -> None:
        oks = tuple(said[member.device] for member in members)
        paused = self._engine.now() - self._paused_at if self._paused_at is not None else 0.0
        if all(oks):
            self.plan = proposal.plan
            if proposal.old is not None:
                self.switches += 1
                self.pause_seconds += paused
                self.bytes_moved += self._moves[proposal.number].total
        for member in members:
            member.feed(sw.Gathered(number=proposal.number, oks=oks))
        self._standing.pop(proposal.number, None)
        self._moving.pop(proposal.number, None)
        self._moves.pop(proposal.number, None)
        self._said.pop(proposal.number, None)
        self._paused_at = None
        self.train()

    def _swapped(self, worker: Worker, number: int) -> Swapped:
        found = self._moves[number]
        lacking = found.lacking.get(worker.device, 0)
        profile = self._truth.profile
        now = self._engine.now()
        return Swapped(
            number=number,
            step=self.step,
            pause_seconds=now - self._paused_at if self._paused_at is not None else 0.0,
            bytes_sent=lacking,
            bytes_lacking=lacking,
            bytes_state=round(profile.parameter_bytes * (1 + profile.optimizer_factor)),
        )

    @property
    def over(self) -> bool:
        return self.over_at is not None

    def end(self) -> None:
        """No step begins or counts any more."""
        if self.over_at is None:
            self.over_at = self._engine.now()

    # -- training ----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Begins the next step, or as many as need not be played."""
        if self.over or self.broken or self.plan is None:
            return
        plan, truth = self.plan, self._truth
        tokens = truth.tokens * self._samples
        began = Began(now=self._engine.now(), speeds=truth.speeds, profile=truth.profile, tokens=tokens)
        full = truth.overfull(plan)
        if full:
            self._starved(full)
            return
        uncounted = self._limit(truth.typical(plan))
        if uncounted > 1:
            self.together(uncounted * truth.typical(plan), lambda: self._passed(began, uncounted))
            return
        times = truth.step(plan, self.step)
        reports = truth.measurements(plan, self.step, times)

        def done() -> None:
            if self.over:
                return
            members = self._vote(plan)
            self.step += 1
            for index, (worker, measured) in enumerate(zip(members, reports, strict=True)):
                first = index == 0
                worker.say(Report(measurement=measured, loss=None, tokens=tokens if first else None))
            self._trained(began, 1)
            self._go_on(members)

        self.together(float(times.seconds), done)

    def _passed(self, began: Began, steps: int) -> None:
        """Steps that were counted: nothing was under way, so that the last vote stands for all."""
        if self.over or self.plan is None:
            return
        members = self._vote(self.plan)
        self.step += steps
        self._trained(began, steps)
        self._go_on(members)

    def _vote(self, plan: Plan) -> list[Worker]:
        members = [self.workers[name] for name in plan.members]
        for worker in members:
            worker.feed(sw.Voting())
        return members

    def _go_on(self, members: list[Worker]) -> None:
        """The vote's result; then the switch that it decided, the end, or the next step."""
        if self.broken:  # a member died just then
            return
        if self._steps is not None and self.step >= self._steps:
            self.end()
            for worker in members:
                worker.say(Finished(step=self.step))
            return
        numbers = tuple(worker.state.voting for worker in members)
        moving = numbers[0] != 0 and len(set(numbers)) == 1
        if moving:
            self._paused_at = self._engine.now()
        for worker in members:
            worker.feed(sw.Voted(prepared=numbers))
        if not moving:
            self.train()


def whole_steps(seconds: float, each: float) -> int:
    """How many whole steps fit."""
    return max(0, math.floor(seconds / each)) if math.isfinite(seconds) else 1 << 40
