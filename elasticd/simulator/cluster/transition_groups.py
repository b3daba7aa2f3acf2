"""Simulated transition groups: the collectives of a switch or a recovery, from its preparation to the swap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elasticd_planner.spec.plan import Plan

from elasticd.machines.worker import switch as sw
from elasticd.records import Proposal
from elasticd.simulator.cluster.worker import SimulatedWorker, SimulationError
from elasticd.simulator.devices.device_model import DeviceModel
from elasticd.simulator.devices.transfer_time import Move, move
from elasticd.simulator.engine import EventEngine
from elasticd.simulator.scenarios.scenario import Times
from elasticd.wire.worker import Prepared, Switched


@dataclass(kw_only=True)
class Transition:
    """The transition group of one proposal."""

    proposal: Proposal
    names: tuple[str, ...]  # devices of old and new members, in rank order
    ready: set[str] = field(default_factory=set)  # devices that have prepared
    moving: set[str] = field(default_factory=set)  # devices that have entered the group
    said: dict[str, bool] = field(default_factory=dict)  # by device: what it says in the all-gather of ok
    found: Move | None = None  # what moves, and for how long
    began: float = 0.0  # seconds, when the last of them entered
    step: int = 0  # updates applied to the state that moves


class GroupHost(Protocol):
    """The job's workers by device, and how long what they do together takes."""

    workers: dict[str, SimulatedWorker]
    step: int
    plan: Plan | None

    def together(self, seconds: float, members: Sequence[SimulatedWorker], done: Callable[[], None]) -> None:
        """Calls `done` after `seconds`, once all `members` can be reached. It never calls it after one of them
        died or left the collective."""
        ...

    def swapped(self, transition: Transition) -> None:
        """All said ok: the new plan is in force."""

    def train(self) -> None:
        """Begins the next step if all members of the plan in force are at work. Called after each all-gather of
        ok, whether or not the members swapped."""
        ...


class Transitions:
    """Transition groups by their plan's number; one is forgotten after its all-gather of ok."""

    def __init__(self, engine: EventEngine, truth: DeviceModel, times: Times, worker_group: GroupHost) -> None:
        self._engine, self._truth, self._times, self._worker_group = engine, truth, times, worker_group
        self._open: dict[int, Transition] = {}

    def of(self, number: int) -> Transition:
        """The group of this plan's number. Raises SimulationError where no worker prepared it, or where it is
        forgotten."""
        if number not in self._open:
            raise SimulationError(f"nobody was told of proposal {number}")
        return self._open[number]

    def shares(self, worker: SimulatedWorker, device: str) -> bool:
        """Returns True if a worker that moves, or is in the all-gather of ok, waits for `device`."""
        transition = self._open.get(worker.state.proposal)
        return transition is not None and device in transition.names

    def said(self, worker: SimulatedWorker) -> bool:
        """Returns True if a worker is in the all-gather of ok."""
        transition = self._open.get(worker.state.proposal)
        return transition is not None and worker.device in transition.said

    def prepare(self, worker: SimulatedWorker, number: int) -> None:
        """A worker prepares its proposal, which takes `Times.prepare` seconds; the first one opens the group.
        Raises SimulationError where `number` is not that of the proposal that the worker read last."""
        proposal = worker.proposal
        if proposal is None or proposal.number != number:
            raise SimulationError(f"{worker.device} prepares {number}, which it was not told of")
        if number not in self._open:
            self._open = {known: kept for known, kept in self._open.items() if known >= number - 2}
            self._open[number] = Transition(proposal=proposal, names=_names(proposal))
        self._worker_group.together(self._times.prepare, [worker], lambda: self._prepared(worker, number))

    def _prepared(self, worker: SimulatedWorker, number: int) -> None:
        """All members' preparations end once all of them are ready."""
        transition = self._open.get(number)
        if worker.state.proposal != number or transition is None:
            return  # it was cut off while the others gave the proposal up, and is alone with it
        transition.ready.add(worker.device)
        if len(transition.ready) == len(transition.names):
            for member in self._members(transition):
                member.feed(Prepared(number=number))

    def leave(self, worker: SimulatedWorker, number: int) -> None:
        """Takes a worker out of one group, as when its proposal is cancelled. Harmless for a number that has no
        group."""
        transition = self._open.get(number)
        if transition is not None:
            transition.ready.discard(worker.device)
            transition.moving.discard(worker.device)
            transition.said.pop(worker.device, None)

    def gone(self, worker: SimulatedWorker) -> None:
        """Takes a worker whose process ended out of all groups: without it none stands."""
        for number in self._open:
            self.leave(worker, number)

    def enter(self, worker: SimulatedWorker, number: int) -> None:
        """A worker enters its group; state moves once all members have."""
        transition = self.of(number)
        proposal, recovery = transition.proposal, transition.proposal.recovery
        transition.step = self._worker_group.step if recovery is None else recovery.step
        worker.side = number, transition.step
        if recovery is not None and worker.device in recovery.sources and proposal.old is not None:
            held = worker.holds(proposal.old.number)
            if held != recovery.step:
                raise SimulationError(f"{worker.device} is to go on from {recovery.step} and holds {held}")
        transition.moving.add(worker.device)
        if len(transition.moving) < len(transition.names):
            return
        transition.began = self._engine.now()
        sources = recovery.sources if recovery is not None else None
        old, plan = proposal.old, proposal.plan
        assert isinstance(plan, Plan)
        assert old is None or isinstance(old, Plan)
        transfer = move(self._truth, old, plan, sources)
        transition.found = transfer
        pause = self._times.pause if proposal.old is not None else 0.0
        members = self._members(transition)

        def moved() -> None:
            for member in members:
                member.feed(sw.StateMoved(number=number))

        self._worker_group.together(transfer.seconds + pause, members, moved)

    def all_gather_ok(self, worker: SimulatedWorker, number: int, ok: bool) -> None:
        """Takes a worker's part of the all-gather. After the last member's part, all members get all parts in
        rank order, a message's time later; the new plan is in force if all are True."""
        transition = self.of(number)
        transition.said[worker.device] = ok
        if len(transition.said) < len(transition.names):
            return
        members = self._members(transition)
        self._worker_group.together(self._times.message, members, lambda: self._gathered(transition, members))

    def _gathered(self, transition: Transition, members: Sequence[SimulatedWorker]) -> None:
        number = transition.proposal.number
        oks = tuple(transition.said[member.device] for member in members)
        if all(oks):
            self._worker_group.swapped(transition)
        for member in members:
            member.feed(sw.Gathered(number=number, oks=oks))
        self._open.pop(number, None)
        self._worker_group.train()

    def switched(self, worker: SimulatedWorker, number: int) -> Switched:
        """Returns the message of a worker's swap: what the switch cost it."""
        transition = self.of(number)
        assert transition.found is not None
        lacking = transition.found.lacking.get(worker.device, 0)
        plan = transition.proposal.plan
        assert isinstance(plan, Plan)
        profiles = [self._truth.profile_of(module.module) for module in plan.modules]
        return Switched(
            number=number,
            step=transition.step,
            pause_seconds=self._engine.now() - transition.began if transition.proposal.old is not None else 0.0,
            bytes_sent=lacking,
            bytes_lacking=lacking,
            bytes_state=sum(
                round(profile.parameter_bytes * (1 + profile.optimizer_factor)) for profile in profiles
            ),
        )

    def _members(self, transition: Transition) -> list[SimulatedWorker]:
        return [self._worker_group.workers[name] for name in transition.names]


def _names(proposal: Proposal) -> tuple[str, ...]:
    """Old and new members; of the old ones, after a fault, those whose copies are gone on from."""
    old = proposal.old.members if proposal.old is not None else ()
    if proposal.recovery is not None:
        old = tuple(name for name in old if name in proposal.recovery.sources)
    return tuple(dict.fromkeys((*old, *proposal.plan.members)))
