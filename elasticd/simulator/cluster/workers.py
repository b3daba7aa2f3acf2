"""The simulated workers of one job: their steps, their votes, and the failures of what they do together.

Each worker decides by its own switch machine (`elasticd.machines.worker.switch`); here are the collectives
between workers, which complete when all members have come, and the time that they take. A collective that is
under way when a member dies, or when a fence is read, fails: its step is made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.problem import ModuleProblem
from elasticd_planner.spec.plan import Plan

from elasticd.machines.worker import switch as sw
from elasticd.simulator.cluster.transition_groups import Transition, Transitions
from elasticd.simulator.cluster.worker import SimulatedWorker, SimulationError
from elasticd.simulator.devices.device_model import DeviceModel, StepTimes
from elasticd.simulator.engine import EventEngine
from elasticd.simulator.scenarios.scenario import Scenario
from elasticd.wire.worker import Finished, PeersLost, Report


@dataclass(frozen=True, kw_only=True)
class Began:
    """The values that hold for a number of steps as their first one begins. A change of a device's speed during
    a step shows in the next one."""

    now: float  # seconds
    speeds: Mapping[str, float]  # by device
    profile: ModelProfile
    tokens: int  # of each step
    modules: tuple[ModuleProblem, ...] = ()  # of items


#: Called after a number of steps: what held as they began, and how many they were.
Told = Callable[[Began, int], None]


class WorkerGroup:
    """The workers of the job, by device.

    Args:
        engine: The virtual clock and its events.
        truth: How fast devices and links are.
        scenario: How many steps the job trains, of how many samples; seconds that a message, a preparation and
            the like take.
        limit: By the seconds of a step: how many may be counted without playing them (0: play the next one).
        trained: Called after a number of steps.
        starved: Called with the reason when the plan in force does not fit the devices' memory.
        recovered: Called with the number of a recovery's plan, and the seconds since the last step's end.
    """

    def __init__(
        self,
        engine: EventEngine,
        truth: DeviceModel,
        scenario: Scenario,
        *,
        limit: Callable[[float], int],
        trained: Told,
        starved: Callable[[str], None],
        recovered: Callable[[int, float], None],
    ) -> None:
        self.engine, self.truth, self._times = engine, truth, scenario.times
        self._steps, self._samples = scenario.steps, scenario.model.global_batch
        self._limit, self._trained, self._starved, self._recovered = limit, trained, starved, recovered
        self.pause_seconds = self.recovery_seconds = 0.0
        self.bytes_moved = 0
        self.switches = self.recoveries = 0
        self.cut: set[str] = set()  # nodes that no message reaches: collectives of their workers wait
        self.life = 0
        self.start(0)

    def start(self, step: int) -> None:
        """Starts over with processes that know nothing but the checkpoint of `step`."""
        self.life += 1
        self.step = step
        self.workers: dict[str, SimulatedWorker] = {}
        self.plan: Plan | None = None
        self.over_at: float | None = None
        self._last = self.engine.now()
        self._waiting: list[Callable[[], None]] = []
        self._transitions = Transitions(self.engine, self.truth, self._times, self)
        self._effects = self._handlers()

    def together(self, seconds: float, members: Sequence[SimulatedWorker], done: Callable[[], None]) -> None:
        """Calls `done` after `seconds`, as soon as all `members` can be reached: they do something together. It
        is never called once one of them died or was torn out of it."""
        life, eras = self.life, [member.era for member in members]

        def due() -> None:
            same = all(member.era == era for member, era in zip(members, eras, strict=True))
            if self.life != life or not same:
                return
            if any(member.frozen or member.node in self.cut for member in members):
                self._waiting.append(due)
            else:
                done()

        self.engine.after(seconds, due)

    def reached(self) -> None:
        """A node can be reached again, or a worker was thawed: collectives that waited for it complete."""
        waiting, self._waiting = self._waiting, []
        for due in waiting:
            self.engine.after(self._times.message, due)

    # -- what the machines ask for ---------------------------------------------------------------------------

    def run(self, worker: SimulatedWorker, effect: sw.SwitchEffect) -> None:
        """Carries out one effect of this worker's switch machine. A worker belongs to the group from its first
        effect on. Raises SimulationError for a type of effect that the group does not know."""
        self.workers[worker.device] = worker
        handler = self._effects.get(type(effect))
        if handler is None:
            raise SimulationError(f"nobody carries {type(effect).__name__} out")
        handler(worker, effect)

    def _handlers(self) -> dict[type, Callable[[SimulatedWorker, Any], None]]:
        """The handler of each effect."""
        transitions = self._transitions
        return {
            sw.Prepare: lambda worker, effect: transitions.prepare(worker, effect.number),
            sw.Cancel: lambda worker, effect: transitions.leave(worker, effect.number),
            sw.MoveState: lambda worker, effect: transitions.enter(worker, effect.number),
            sw.AllGatherOk: lambda worker, effect: transitions.all_gather_ok(worker, effect.number, effect.ok),
            sw.Swap: self._swap,
            sw.SendToLeader: lambda worker, effect: worker.say(effect.message),
            sw.ReportState: lambda worker, effect: worker.say(worker.state_report(effect.fence)),
            sw.DropOld: lambda worker, effect: worker.kept.clear(),
            sw.Interrupt: lambda worker, effect: self._interrupt(worker),
            sw.DropState: lambda worker, effect: worker.drop_state(),
            sw.DropStateAndRejoin: lambda worker, effect: worker.drop_state_and_rejoin(),
            sw.StopTraining: lambda worker, effect: self.end(),
        }

    def _swap(self, worker: SimulatedWorker, effect: sw.Swap) -> None:
        worker.swap(effect.number, self._transitions.of(effect.number).step, effect.member)
        worker.say(self._transitions.switched(worker, effect.number))

    def swapped(self, transition: Transition) -> None:
        """All said ok: the new plan is in force."""
        proposal, now = transition.proposal, self.engine.now()
        if transition.step != self.step:
            raise SimulationError(f"plan {proposal.number} goes on from {transition.step}, not {self.step}")
        assert isinstance(proposal.plan, Plan)
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
        """True if the job or the scenario has ended; `over_at` says when, in virtual seconds."""
        return self.over_at is not None

    def end(self) -> None:
        """No step begins or counts any more."""
        if self.over_at is None:
            self.over_at = self.engine.now()

    # -- faults ------------------------------------------------------------------------------------------------

    def died(self, worker: SimulatedWorker, *, told: bool) -> None:
        """A process ended. Its peers find its connections closed (`told`); if its node is gone, they time
        out."""
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
        """Fails the collectives with `device` after `seconds`, where nothing else has ended them before."""
        life, others = self.life, [(other, other.era) for other in self.workers.values()]

        def fail() -> None:
            for other, era in others:
                if self.life == life and other.alive and other.era == era:
                    self._bereave(other, device, f"{device} {why}")

        self.engine.after(seconds, fail)

    def _bereave(self, worker: SimulatedWorker, device: str, why: str) -> None:
        """A collective with `device` fails here."""
        if worker.frozen:
            era = worker.era
            worker.later(lambda: self._bereave(worker, device, why) if worker.era == era else None)
            return
        if worker.state.phase in (sw.SwitchPhase.MOVING, sw.SwitchPhase.ACKING) and self._transitions.shares(
            worker, device
        ):
            worker.torn()
            number = worker.state.proposal
            if worker.state.phase is sw.SwitchPhase.MOVING:
                worker.feed(sw.MoveFailed(number=number, reason=why))
            worker.feed(sw.GatherFailed(number=number, reason=why))
        if worker.at_work and self.plan is not None and device in self.plan.members:
            worker.torn()
            worker.feed(PeersLost(step=self.step, reason=why, plan=worker.plan))

    def _interrupt(self, worker: SimulatedWorker) -> None:
        """Every collective that the worker waits in fails at once; then it is at rest."""
        worker.torn()
        life = self.life

        def rest() -> None:
            if self.life != life or worker.state.phase is not sw.SwitchPhase.STOPPING:
                return
            number, why = worker.state.proposal, "a fence was read"
            if number and self._transitions.said(worker):
                worker.feed(sw.GatherFailed(number=number, reason=why))
            elif number:
                worker.feed(sw.MoveFailed(number=number, reason=why))
            worker.feed(sw.Rested())

        self.engine.after(self._times.message, rest)

    # -- training ----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Begins the next step, or as many as need not be played, if all members of the plan are at work."""
        if self.over or self.plan is None:
            return
        plan, truth = self.plan, self.truth
        members = [worker for name in plan.members if (worker := self.workers.get(name)) and worker.at_work]
        if len(members) < len(plan.members):
            return
        tokens = truth.tokens * self._samples
        began = Began(
            now=self.engine.now(),
            speeds=truth.speeds,
            profile=truth.profile,
            tokens=tokens,
            modules=truth.modules,
        )
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
        """Returns the members' reports of a step; the first one adds the step's tokens."""
        return [
            Report(measurement=measured, loss=None, tokens=None if index else tokens)
            for index, measured in enumerate(self.truth.measurements(plan, step, times))
        ]

    def _counted(self, began: Began, steps: int, plan: Plan, members: list[SimulatedWorker]) -> None:
        """Counts steps that were not played: no proposal was open, so that the last vote stands for all. The
        first member's report of the last one says how far they are."""
        last = self.step + steps - 1
        reports = self._reports(plan, last, self.truth.step(plan, last), began.tokens)
        self._passed(began, steps, members, reports[:1])

    def _passed(
        self, began: Began, steps: int, members: list[SimulatedWorker], reports: Sequence[Report]
    ) -> None:
        """Steps are made: the vote's records. Their outcome follows once the script had its turn."""
        if self.over:
            return
        for worker in members:
            worker.feed(sw.Voting())
        self.step += steps
        self._last = self.engine.now()
        for worker in members:
            worker.step = self.step
        for worker, report in zip(members, reports, strict=False):
            worker.say(report)
        self._trained(began, steps)
        self._go_on(members)

    def _go_on(self, members: list[SimulatedWorker]) -> None:
        """The vote's outcome, also for members that lost another one just then; then the switch that it
        decided, the end, or the next step."""
        if self._steps is not None and self.step >= self._steps:
            self.end()
            for worker in members:
                worker.say(Finished(step=self.step))
            return
        numbers = tuple(worker.state.voting for worker in members)
        for worker in members:
            if (
                worker.state.phase is not sw.SwitchPhase.STOPPED
            ):  # by an order that the script let it hear just now
                worker.feed(sw.Voted(prepared=numbers))
        if numbers[0] == 0 or len(set(numbers)) > 1:
            self.train()


def whole_steps(seconds: float, each: float) -> int:
    """Returns how many steps of `each` seconds fit into `seconds`."""
    return max(0, math.floor(seconds / each)) if math.isfinite(seconds) else 1 << 40
