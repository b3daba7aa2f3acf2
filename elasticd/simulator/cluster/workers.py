"""What the workers of a job do together: train step by step, vote, and lose each other.

Every worker's part is decided by its own machine (`elasticd.machines.worker.switch`); here are the collectives
between them, which complete when all members have come, and the time that all of it takes. What is under way
when a member dies, or when a fence is read, ends there: its step is made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.spec.plan import Plan

from elasticd.machines.worker import switch as sw
from elasticd.simulator.cluster.transition_groups import Transition, Transitions
from elasticd.simulator.cluster.worker import SimulationError, Worker
from elasticd.simulator.devices.device_model import StepTimes, Truth
from elasticd.simulator.engine import Engine
from elasticd.simulator.scenarios.scenario import Times
from elasticd.wire.messages import Bereft, Doubt, Finished, Kept, Prepared, Refused, Report


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
    """The workers of the job, by device. `plan` is in force, `step` updates were applied. The script says by
    `limit` how many steps may be counted without playing them (0: play the next one). `cut`: nodes that nobody
    reaches; what their workers do with others waits. `recovered` is told of a recovery's plan and what the
    fault took: the seconds from the last step's end."""

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
        recovered: Callable[[int, float], None],
    ) -> None:
        self._engine, self._truth, self._times = engine, truth, times
        self._steps, self._samples = steps, samples
        self._limit, self._trained, self._starved, self._recovered = limit, trained, starved, recovered
        self.pause_seconds = self.recovery_seconds = 0.0
        self.bytes_moved = 0
        self.switches = self.recoveries = 0
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
        self._last = self._engine.now()
        self._waiting: list[Callable[[], None]] = []
        self._transitions = Transitions(self._engine, self._truth, self._times, self)

    def together(self, seconds: float, members: Sequence[Worker], done: Callable[[], None]) -> None:
        """What `members` do together and end after `seconds`, if all of them can be reached then. It never ends
        once one of them died or was torn out of it."""
        life, eras = self.life, [member.era for member in members]

        def due() -> None:
            same = all(member.era == era for member, era in zip(members, eras, strict=True))
            if self.life != life or not same:
                return
            if any(member.frozen or member.node in self.cut for member in members):
                self._waiting.append(due)
            else:
                done()

        self._engine.after(seconds, due)

    def reached(self) -> None:
        """A node can be reached again, or a worker was thawed: what waited for it goes on."""
        waiting, self._waiting = self._waiting, []
        for due in waiting:
            self._engine.after(self._times.message, due)

    # -- what the machines ask for ---------------------------------------------------------------------------

    def run(self, worker: Worker, effect: sw.Effect) -> None:
        self.workers[worker.device] = worker
        match effect:
            case sw.Prepare(number=number):
                self._transitions.prepare(worker, number)
            case sw.Cancel(number=number):
                self._transitions.leave(worker, number)
            case sw.Move(number=number):
                self._transitions.enter(worker, number)
            case sw.Say(number=number, ok=ok):
                self._transitions.say(worker, number, ok)
            case sw.Swap(number=number, member=member):
                worker.swap(number, self._transitions.of(number).step, member)
            case sw.DropOld():
                worker.kept.clear()
            case sw.Interrupt():
                self._interrupt(worker)
            case sw.Retire():
                worker.retire()
            case sw.Renounce():
                worker.renounce()
            case sw.Stop():
                self.end()
            case _:
                self._report(worker, effect)

    def _report(self, worker: Worker, effect: sw.Effect) -> None:
        match effect:
            case sw.ReportPrepared(number=number):
                worker.say(Prepared(number=number))
            case sw.ReportRefused(number=number, reason=reason):
                worker.say(Refused(number=number, reason=reason))
            case sw.ReportSwapped(number=number):
                worker.say(self._transitions.report(worker, number))
            case sw.ReportKept(number=number, reason=reason):
                worker.say(Kept(number=number, step=self.step, reason=reason))
            case sw.ReportDoubt(number=number, reason=reason):
                worker.say(Doubt(number=number, step=self.step, reason=reason))
            case sw.ReportLost(reason=reason):
                worker.say(Bereft(step=self.step, reason=reason, plan=worker.plan))
            case sw.ReportStanding(fence=fence):
                worker.say(worker.standing(fence))
            case _:
                raise SimulationError(f"nobody carries {type(effect).__name__} out")

    def swapped(self, transition: Transition) -> None:
        """All said ok: the new plan is in force."""
        proposal, now = transition.proposal, self._engine.now()
        if transition.step != self.step:
            raise SimulationError(f"plan {proposal.number} goes on from {transition.step}, not {self.step}")
        self.plan = proposal.plan
        if proposal.old is None:
            return
        assert transition.found is not None
        self.bytes_moved += transition.found.total
        if proposal.recovery is None:
            self.switches += 1
            self.pause_seconds += now - transition.began
        else:
            self.recoveries += 1
            self.recovery_seconds += now - self._last
            self._recovered(proposal.number, now - self._last)
        self._last = now

    @property
    def over(self) -> bool:
        return self.over_at is not None

    def end(self) -> None:
        """No step begins or counts any more."""
        if self.over_at is None:
            self.over_at = self._engine.now()

    # -- faults ------------------------------------------------------------------------------------------------

    def died(self, worker: Worker, *, told: bool) -> None:
        """Its peers find its connections closed; if its whole machine is gone, they wait."""
        if not worker.alive:
            return
        worker.alive = False
        worker.torn()
        if self.workers.get(worker.device) is not worker:
            return
        del self.workers[worker.device]
        self._transitions.gone(worker)
        self.lose(worker.device, self._times.message if told else self._times.patience, "is gone")

    def lose(self, device: str, seconds: float, why: str) -> None:
        """After `seconds` fails what others do with `device`, where nothing else has ended it before."""
        life, others = self.life, [(other, other.era) for other in self.workers.values()]

        def fail() -> None:
            for other, era in others:
                if self.life == life and other.alive and other.era == era:
                    self._bereave(other, device, f"{device} {why}")

        self._engine.after(seconds, fail)

    def _bereave(self, worker: Worker, device: str, why: str) -> None:
        """A collective with `device` fails here."""
        if worker.frozen:
            era = worker.era
            worker.later(lambda: self._bereave(worker, device, why) if worker.era == era else None)
            return
        if worker.state.phase in (sw.Phase.MOVING, sw.Phase.SAYING) and self._transitions.shares(
            worker, device
        ):
            worker.torn()
            number = worker.state.proposal
            if worker.state.phase is sw.Phase.MOVING:
                worker.feed(sw.MoveFailed(number=number, reason=why))
            worker.feed(sw.GatherFailed(number=number, reason=why))
        if worker.at_work and self.plan is not None and device in self.plan.members:
            worker.torn()
            worker.feed(sw.Lost(reason=why))

    def _interrupt(self, worker: Worker) -> None:
        """All that it waits for fails at once; then it is at rest."""
        worker.torn()
        life = self.life

        def rest() -> None:
            if self.life != life or worker.state.phase is not sw.Phase.INTERRUPTED:
                return
            number, why = worker.state.proposal, "a fence was read"
            if number and self._transitions.said(worker):
                worker.feed(sw.GatherFailed(number=number, reason=why))
            elif number:
                worker.feed(sw.MoveFailed(number=number, reason=why))
            worker.feed(sw.Rested())

        self._engine.after(self._times.message, rest)

    # -- training ----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Begins the next step, or as many as need not be played, if all members are there and may."""
        if self.over or self.plan is None:
            return
        plan, truth = self.plan, self._truth
        members = [worker for name in plan.members if (worker := self.workers.get(name)) and worker.at_work]
        if len(members) < len(plan.members):
            return
        tokens = truth.tokens * self._samples
        began = Began(now=self._engine.now(), speeds=truth.speeds, profile=truth.profile, tokens=tokens)
        full = truth.overfull(plan)
        if full:
            self._starved(full)
            return
        uncounted = self._limit(truth.typical(plan))
        if uncounted > 1:
            seconds = uncounted * truth.typical(plan)
            self.together(seconds, members, lambda: self._counted(began, uncounted, plan, members))
            return
        times = truth.step(plan, self.step)
        reports = self._reports(plan, self.step, times, tokens)
        self.together(float(times.seconds), members, lambda: self._passed(began, 1, members, reports))

    def _reports(self, plan: Plan, step: int, times: StepTimes, tokens: int) -> list[Report]:
        """What the members say of a step; the first one speaks for all."""
        return [
            Report(measurement=measured, loss=None, tokens=None if index else tokens)
            for index, measured in enumerate(self._truth.measurements(plan, step, times))
        ]

    def _counted(self, began: Began, steps: int, plan: Plan, members: list[Worker]) -> None:
        """Steps that were not played: nothing was under way, so that the last vote stands for all. The first
        member's word of the last one says how far they are."""
        last = self.step + steps - 1
        reports = self._reports(plan, last, self._truth.step(plan, last), began.tokens)
        self._passed(began, steps, members, reports[:1])

    def _passed(self, began: Began, steps: int, members: list[Worker], reports: Sequence[Report]) -> None:
        """The vote's records; what they decide follows once the script has had its say."""
        if self.over:
            return
        for worker in members:
            worker.feed(sw.Voting())
        self.step += steps
        self._last = self._engine.now()
        for worker in members:
            worker.step = self.step
        for worker, report in zip(members, reports, strict=False):
            worker.say(report)
        self._trained(began, steps)
        self._go_on(members)

    def _go_on(self, members: list[Worker]) -> None:
        """The vote's result, also for those who lost another one just then; then the switch that it decided,
        the end, or the next step."""
        if self._steps is not None and self.step >= self._steps:
            self.end()
            for worker in members:
                worker.say(Finished(step=self.step))
            return
        numbers = tuple(worker.state.voting for worker in members)
        for worker in members:
            if worker.state.phase is not sw.Phase.STOPPED:  # by an order that the script let it hear just now
                worker.feed(sw.Voted(prepared=numbers))
        if numbers[0] == 0 or len(set(numbers)) > 1:
            self.train()


def whole_steps(seconds: float, each: float) -> int:
    """How many whole steps fit."""
    return max(0, math.floor(seconds / each)) if math.isfinite(seconds) else 1 << 40
