"""A worker: the real machine of its switches and faults, and the copies of state that it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elasticd_planner.spec.cluster import node_of

from elasticd.machines.worker import switch as sw
from elasticd.records import Proposal
from elasticd.wire.messages import (
    Abort,
    Copy,
    Fenced,
    FromWorker,
    Propose,
    Recorded,
    Rejected,
    Shutdown,
    Standing,
    ToWorker,
)


class SimulationError(RuntimeError):
    """What must not happen in a simulation: an error of this program, or of a machine that it plays."""


class Gang(Protocol):
    """What workers do together: the effects of their machines are carried out there."""

    def run(self, worker: Worker, effect: sw.Effect) -> None: ...

    def died(self, worker: Worker, *, told: bool) -> None:
        """The process is gone. `told`: its peers learn it at once, since its machine lives."""


class Worker:
    """One training process. `plan` is in force here (0: it stands by) after `step` updates; `kept` are its
    other copies, by plan, with their steps, and `side` the plan that it moved to last, with the step.
    `proposal` is what it was told of last. `era` counts how often it was torn out of what it did with others:
    what began before does not end any more. `renew` lets its agent know it as another incarnation. While it is
    frozen, what it would do waits in order until it is thawed."""

    def __init__(
        self,
        device: str,
        client: str,
        gang: Gang,
        *,
        emit: Callable[[Worker, FromWorker], None],
        renew: Callable[[Worker], None],
    ) -> None:
        self.device, self.client = device, client
        self._gang, self._emit, self._renew = gang, emit, renew
        self.state = sw.State()
        self.proposal: Proposal | None = None
        self.plan, self.step = 0, 0
        self.kept: dict[int, int] = {}
        self.side = (0, 0)
        self.alive = True
        self.frozen = False
        self._waiting: list[Callable[[], None]] = []
        self.era = 0
        self.incarnations = 1

    @property
    def node(self) -> str:
        return node_of(self.device)

    @property
    def at_work(self) -> bool:
        """Whether it may make a step under the plan in force here."""
        state = self.state
        beside = (sw.Phase.TRAINING, sw.Phase.PREPARING, sw.Phase.READY, sw.Phase.WITHDRAWN)
        return self.alive and state.trains and not state.fenced and state.phase in beside

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def later(self, call: Callable[[], None]) -> None:
        """Once it is thawed."""
        self._waiting.append(call)

    def receive(self, message: ToWorker) -> None:
        if self.frozen:
            self.later(lambda: self.receive(message))
            return
        match message:
            case Propose(proposal=proposal):
                self.proposal = proposal
                self.feed(sw.Proposed(number=proposal.number, joins=self.device in proposal.plan.members))
            case Fenced(number=number, evicted=evicted):
                self.feed(sw.Fenced(number=number, evicted=evicted))
            case Abort(number=number, reason=reason):
                self.feed(sw.Aborted(number=number, reason=reason))
            case Recorded(number=number):
                self.feed(sw.Recorded(number=number))
            case Shutdown(reason=reason) | Rejected(reason=reason):
                self.feed(sw.Ordered(reason=reason))
            case _:
                pass  # a welcome, or the end for one that stood by

    def feed(self, event: sw.Event) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.later(lambda: self.feed(event))
            return
        self.state, effects = sw.step(self.state, event)
        for effect in effects:
            self._gang.run(self, effect)

    def say(self, body: FromWorker) -> None:
        if self.alive:
            self._emit(self, body)

    def torn(self) -> None:
        """What it did with others ends here."""
        self.era += 1

    def holds(self, number: int) -> int | None:
        """The updates that its copy of that plan has seen; None without one."""
        return self.step if number == self.plan else self.kept.get(number)

    def swap(self, number: int, step: int, member: bool) -> None:
        """`number` is in force; the old copy stays."""
        if self.plan:
            self.kept[self.plan] = self.step
        self.kept.pop(number, None)
        self.plan, self.step = (number if member else 0), step

    def standing(self, fence: int) -> Standing:
        """What it holds, nothing being under way. All members of a plan hear its votes at one time here, so
        that nobody is behind."""
        if self.state.side:
            number, step = self.side
            if number != self.state.side:
                raise SimulationError(f"{self.device} has no copy of {self.state.side}")
            self.kept[number] = step
        held = {**self.kept, **({self.plan: self.step} if self.plan else {})}
        copies = tuple(Copy(number=number, step=step) for number, step in sorted(held.items()))
        return Standing(fence=fence, copies=copies)

    def retire(self) -> None:
        """Every copy goes."""
        self.kept.clear()
        self.plan = 0

    def renounce(self) -> None:
        """It owns nothing any more, and comes again as another incarnation."""
        self.retire()
        self.proposal = None
        self.torn()
        self.incarnations += 1
        self._renew(self)
