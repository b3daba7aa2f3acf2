"""What the workers of a job do together: train step by step, vote, and carry a switch through.

Every worker's part is decided by its own machine (`elasticd.machines.switch`); here are the collectives
between them, which complete when all members have come, and the time that all of it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from elasticd_planner.plan import Plan

from elasticd.machines import switch as sw
from elasticd.messages import Doubt, Finished, Kept, Prepared, Refused, Report, Swapped
from elasticd.records import Proposal
from elasticd.simulator.engine import Engine
from elasticd.simulator.moving import Move, move
from elasticd.simulator.nodes import SimulationError, Worker
from elasticd.simulator.scenario import Times
from elasticd.simulator.truth import Floats, Truth

#: Called after each stretch of training: steps, seconds, and how slow each device was in it.
Trained = Callable[[int, float, Floats], None]


class Gang:
    """The workers of the job. `plan` is in force, `step` updates were applied. The script says by `limit` how
    many steps may be counted without playing them (0: play the next one)."""

    def __init__(
        self,
        engine: Engine,
        truth: Truth,
        times: Times,
        *,
        steps: int | None,
        tokens_per_step: int,
        limit: Callable[[float], int],
        trained: Trained,
    ) -> None:
        self._engine, self._truth, self._times = engine, truth, times
        self._steps, self._tokens = steps, tokens_per_step
        self._limit, self._trained = limit, trained
        self.workers: dict[str, Worker] = {}
        self.plan: Plan | None = None
        self.step = 0
        self.pause_seconds = 0.0
        self.bytes_moved = 0
        self.switches = 0
        self.over_at: float | None = None
        self.stopped = ""
        self._paused_at: float | None = None
        self._standing: dict[int, set[str]] = {}
        self._moving: dict[int, set[str]] = {}
        self._moves: dict[int, Move] = {}
        self._said: dict[int, dict[str, bool]] = {}

    # -- what the machines ask for ---------------------------------------------------------------------------

    def run(self, worker: Worker, effect: sw.Effect) -> None:
        self.workers.setdefault(worker.device, worker)
        match effect:
            case sw.Prepare(number=number):
                self._engine.after(self._times.prepare, lambda: self._prepared(worker, number))
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

        self._engine.after(found.seconds + pause, moved)

    def _say(self, worker: Worker, number: int, ok: bool) -> None:
        said = self._said.setdefault(number, {})
        said[worker.device] = ok
        if len(said) < self._size(worker, number):
            return
        members, proposal = self._all(worker, number), self._proposal(worker, number)
        self._engine.after(self._times.message, lambda: self._gathered(proposal, members, dict(said)))

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
            bytes_state=round(profile.gradient_bytes * (profile.state_factor - 1)),
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
        if self.over or self.plan is None:
            return
        plan = self.plan
        typical = self._truth.typical(plan)
        factors = self._truth.factors.copy()
        uncounted = self._limit(typical)
        if uncounted > 1:
            seconds = uncounted * typical
            self._engine.after(seconds, lambda: self._passed(uncounted, seconds, factors))
            return
        times = self._truth.step(plan, self.step)
        reports = self._truth.measurements(plan, self.step, times)

        def done() -> None:
            if self.over:
                return
            members = self._vote(plan)
            self.step += 1
            for index, (worker, measured) in enumerate(zip(members, reports, strict=True)):
                first = index == 0
                worker.say(Report(measurement=measured, loss=None, tokens=self._tokens if first else None))
            self._trained(1, times.seconds, factors)
            self._go_on(members)

        self._engine.after(times.seconds, done)

    def _passed(self, steps: int, seconds: float, factors: Floats) -> None:
        """Steps that were counted: nothing was under way, so that the last vote stands for all."""
        if self.over or self.plan is None:
            return
        members = self._vote(self.plan)
        self.step += steps
        self._trained(steps, seconds, factors)
        self._go_on(members)

    def _vote(self, plan: Plan) -> list[Worker]:
        members = [self.workers[name] for name in plan.members]
        for worker in members:
            worker.feed(sw.Voting())
        return members

    def _go_on(self, members: list[Worker]) -> None:
        """The vote's result; then the switch that it decided, the end, or the next step."""
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
