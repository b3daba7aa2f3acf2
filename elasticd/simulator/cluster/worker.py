"""A simulated training process: its real switch machine, and which copies of the state it holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from elasticd_planner.spec.cluster import node_of

from elasticd.machines.worker import switch as sw
from elasticd.records import Proposal, decode
from elasticd.wire.worker import Copy, FromItsAgent, FromWorker, PassedProposal, StateReport


class SimulationError(RuntimeError):
    """An error of this program, or of a machine that it plays."""


class SimulatedWorker:
    """One training process. While it is frozen, what it would do waits in order until it is thawed.

    Args:
        device: Its device's name.
        client: Its name as a client of its agent.
        run: Carries out an effect of its switch machine.
        steps: How many updates the job has applied.
        emit: Takes a message to its agent.
        renew: Makes it known to its agent as another incarnation.
    """

    def __init__(
        self,
        device: str,
        client: str,
        *,
        run: Callable[[SimulatedWorker, sw.SwitchEffect], None],
        steps: Callable[[], int],
        emit: Callable[[SimulatedWorker, FromWorker], None],
        renew: Callable[[SimulatedWorker], None],
    ) -> None:
        self.device, self.client = device, client
        self._run, self._steps, self._emit, self._renew = run, steps, emit, renew
        self.state = sw.SwitchState()
        self.proposal: Proposal | None = None  # the one that it read last
        self.plan, self.step = 0, 0  # in force here (0: it stands by), after so many updates
        self.kept: dict[int, int] = {}  # other copies of the state: the updates applied, by plan
        self.side = (0, 0)  # the plan that it moved to last, and the updates applied to that copy
        self.alive = True
        self.frozen = False
        self._waiting: list[Callable[[], None]] = []
        self.era = 0  # how often it was torn out of a collective: none that began before ends any more
        self.incarnations = 1

    @property
    def node(self) -> str:
        """The name of its device's node: n0 for device n0/3."""
        return node_of(self.device)

    @property
    def at_work(self) -> bool:
        """True if it lives and may make a step under the plan in force here."""
        return self.alive and self.state.at_work

    def freeze(self) -> None:
        """Stops the process without ending it. Messages and events wait, and so does every collective with
        it."""
        self.frozen = True

    def thaw(self) -> None:
        """Takes in what has waited, in order. Collectives that waited for this worker are up to
        `WorkerGroup.reached`."""
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def later(self, call: Callable[[], None]) -> None:
        """Has this called once it is thawed."""
        self._waiting.append(call)

    def receive(self, message: FromItsAgent) -> None:
        """Takes a message of its agent: proposals and orders go to its switch machine, other messages are
        ignored. While it is frozen the message waits."""
        if self.frozen:
            self.later(lambda: self.receive(message))
            return
        match message:
            case PassedProposal(proposal=stored):
                self.proposal = proposal = _decoded(bytes(stored))
                self.feed(sw.Proposed(number=proposal.number, joins=self.device in proposal.plan.members))
            case _ if isinstance(message, sw.AgentOrder):
                self.feed(message)
            case _:
                pass  # a welcome, or the end for one that stood by

    def feed(self, event: sw.SwitchEvent) -> None:
        """One step of its switch machine, whose effects are carried out at once. Events for a process that has
        ended are dropped."""
        if not self.alive:
            return
        if self.frozen:
            self.later(lambda: self.feed(event))
            return
        self.state, effects = sw.step(self.state, event, self._steps())
        for effect in effects:
            self._run(self, effect)

    def say(self, body: FromWorker) -> None:
        """Sends a message to its agent, unless the process has ended."""
        if self.alive:
            self._emit(self, body)

    def torn(self) -> None:
        """Ends its work with others."""
        self.era += 1

    def holds(self, number: int) -> int | None:
        """The updates that its copy of that plan has seen; None without one."""
        return self.step if number == self.plan else self.kept.get(number)

    def swap(self, number: int, step: int, member: bool) -> None:
        """Puts plan `number` into force, after `step` updates; the old copy stays."""
        if self.plan:
            self.kept[self.plan] = self.step
        self.kept.pop(number, None)
        self.plan, self.step = (number if member else 0), step

    def state_report(self, fence: int) -> StateReport:
        """Returns which copies it holds at rest. All members of a plan get a vote's outcome at one time here,
        so that no copy is a step behind."""
        if self.state.side:
            number, step = self.side
            if number != self.state.side:
                raise SimulationError(f"{self.device} has no copy of {self.state.side}")
            self.kept[number] = step
        held = {**self.kept, **({self.plan: self.step} if self.plan else {})}
        copies = tuple(Copy(number=number, step=step) for number, step in sorted(held.items()))
        return StateReport(fence=fence, copies=copies)

    def drop_state(self) -> None:
        """Drops every copy."""
        self.kept.clear()
        self.plan = 0

    def drop_state_and_rejoin(self) -> None:
        """Drops every copy, and comes again as another incarnation."""
        self.drop_state()
        self.proposal = None
        self.torn()
        self.incarnations += 1
        self._renew(self)


@lru_cache(maxsize=16)
def _decoded(stored: bytes) -> Proposal:
    """A proposal, decoded once for all workers of the simulated cluster."""
    return decode(stored, Proposal)
