"""Nodes: each with the real machine of an agent, a torchrun, and a worker with the real machine of a switch.

What is shared, so that thousands of devices stay cheap: one watch of the store reads each record once for
all agents, and a worker's work is done by the gang, which knows what all of them do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from elasticd_planner.cluster import Node as NodeShape

from elasticd.machines import agent
from elasticd.machines import switch as sw
from elasticd.machines.agent_state import (
    DoneRead,
    Effect,
    Ended,
    Event,
    Heard,
    LeaderRead,
    LinkDown,
    LinkUp,
    Opened,
    Phase,
    PlanRead,
    ProposalRead,
    Said,
    Send,
    State,
    Stop,
    Tell,
)
from elasticd.messages import (
    Abort,
    Closed,
    Down,
    FromWorker,
    Hello,
    Join,
    Joined,
    Propose,
    Recorded,
    Rejected,
    Shutdown,
    ToLeader,
    ToWorker,
)
from elasticd.records import DoneRecord, JobSpec, Keys, NodeRecord, PlanRecord, Proposal, decode
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import WatchEvent, WatchItem


class SimulationError(RuntimeError):
    """What must not happen in a simulation: an error of this program, or of a machine that it plays."""


class Gang(Protocol):
    """What workers do together: the effects of their switches are carried out there."""

    def run(self, worker: Worker, effect: sw.Effect) -> None: ...


class Worker:
    """One training process: the machine of its switch, and the proposal it was told of last."""

    def __init__(self, device: str, node: Node, gang: Gang, torchrun: int) -> None:
        self.device, self.node, self._gang = device, node, gang
        self.client = f"w{device}-{torchrun}"
        self.state = sw.State()
        self.proposal: Proposal | None = None

    def receive(self, message: ToWorker) -> None:
        match message:
            case Propose(proposal=proposal):
                self.proposal = proposal
                self.feed(sw.Proposed(number=proposal.number, joins=self.device in proposal.plan.members))
            case Abort(number=number, reason=reason):
                self.feed(sw.Aborted(number=number, reason=reason))
            case Recorded(number=number):
                self.feed(sw.Recorded(number=number))
            case Shutdown(reason=reason) | Rejected(reason=reason):
                self.feed(sw.Ordered(reason=reason))
            case _:
                pass  # a welcome, or the end for one that stood by

    def feed(self, event: sw.Event) -> None:
        self.state, effects = sw.step(self.state, event)
        for effect in effects:
            self._gang.run(self, effect)

    def say(self, body: FromWorker) -> None:
        self.node.emit(Said(client=self.client, body=body))


class Node:
    """An agent's machine and what it drives. `tell` takes its words to the leader, `refused` hears why its
    torchrun was turned away. While `apart` it reads nothing of the store, and reads all when it is back."""

    def __init__(
        self,
        shape: NodeShape,
        gang: Gang,
        tell: Callable[[str, ToLeader], None],
        refused: Callable[[str, str], None],
    ) -> None:
        self.name = shape.name
        self.workers: dict[str, Worker] = {}
        self.apart = False
        self._shape, self._gang, self._tell, self._refused = shape, gang, tell, refused
        self._events: deque[Event] = deque()
        self._missed: list[Event] = []
        self._hello: Callable[[int, int], Hello] | None = None
        self._torchrun = ""
        self._boots = 0
        self.state = self._booted()

    def _booted(self) -> State:
        """An agent that knows nothing yet."""
        self._boots += 1
        record = NodeRecord(
            node=self.name,
            devices=self._shape.devices,
            address="127.0.0.1",
            agent=f"a{self._boots}-{self.name}",
            emulated=True,
        )
        return State(record=record)

    def emit(self, event: Event) -> None:
        """One event after the other: what an effect emits waits until the effects before it are done."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            self.state, effects = agent.step(self.state, self._events[0], 0.0)
            for effect in effects:
                self._perform(effect)
            self._events.popleft()

    def torchrun(self, spec: JobSpec, pid: int, nodes: int) -> None:
        """A torchrun on this node asks to take part; its workers start once the nodes are complete."""
        size = nodes * len(self._shape.devices)

        def hello(rank: int, process: int) -> Hello:
            return Hello(job=spec.job, local_rank=rank, world_size=size, pid=process, spec=spec)

        self._hello, self._pid = hello, pid
        self._torchrun = f"t{self.name}-{pid}"
        join = Join(job=spec.job, min_nodes=nodes, max_nodes=nodes, pid=pid)
        self.emit(Opened(client=self._torchrun, body=join, pid=pid, incarnation=self._torchrun))

    def end(self, how: str) -> None:
        """All processes that torchrun started here end, and torchrun with them."""
        clients, self.workers = (*self.workers, self._torchrun), {}
        self._torchrun = ""
        for client in clients:
            if client:
                self.emit(Ended(client=client, how=how))

    def crash(self) -> None:
        """The whole machine is gone; what boots later knows nothing of it."""
        self.workers, self._torchrun = {}, ""
        self._missed.clear()
        self.state = self._booted()

    def read(self, event: Event) -> None:
        """A record of the store."""
        if self.apart:
            self._missed.append(event)
        else:
            self.emit(event)

    def back(self) -> None:
        """The store can be reached again: its watch goes on where it was."""
        self.apart = False
        missed, self._missed = self._missed, []
        for event in missed:
            self.emit(event)

    @property
    def linked(self) -> bool:
        return self.state.phase is Phase.LINKED

    def link(self, up: bool) -> None:
        if up != self.linked:
            self.emit(LinkUp() if up else LinkDown())

    def down(self, message: Down) -> None:
        if self.linked:  # what was on its way when the link broke is lost
            self.emit(Heard(message=message))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Tell(message=message):
                self._tell(self.name, message)
            case Send(client=client, body=body) if client in self.workers:
                self.workers[client].receive(body)
            case Send(body=Joined()):
                self._start()
            case Send(body=Closed() | Shutdown()):
                pass  # the torchrun ends; its workers were told themselves
            case Send(body=Rejected(reason=reason)):
                self._refused(self.name, reason)
            case Stop(reason=reason):
                raise SimulationError(f"node {self.name} was turned away: {reason}")
            case _:
                pass  # member keys are for people; the leader hears of workers from the agents

    def _start(self) -> None:
        assert self._hello is not None
        for rank, device in enumerate(self._shape.devices):
            worker = Worker(device.name, self, self._gang, self._pid)
            self.workers[worker.client] = worker
            pid = self._pid + 1 + rank
            hello = self._hello(rank, pid)
            self.emit(Opened(client=worker.client, body=hello, pid=pid, incarnation=f"i{pid}-{device.name}"))


def read_for_all(
    store: MemoryStore, keys: Keys, nodes: Sequence[Node], later: Callable[[Callable[[], None]], object]
) -> None:
    """Watches the store on behalf of all agents: each record is read once, and handed on as an event."""

    def spread(event: Event) -> None:
        def emit() -> None:
            for node in nodes:
                node.read(event)

        later(emit)

    def take(item: WatchItem) -> None:
        if not isinstance(item, WatchEvent):
            raise SimulationError("the store forgot what its watch had not read")
        value = item.item.value if item.kind == "put" else None
        job, _, part = item.key.removeprefix(keys.jobs).rpartition("/")
        if item.key == keys.leader:
            if value is not None:
                spread(LeaderRead(epoch=item.item.create_revision))
        elif part == "proposal":
            spread(ProposalRead(job=job, proposal=decode(value, Proposal) if value is not None else None))
        elif part == "plan":
            spread(PlanRead(job=job, record=decode(value, PlanRecord) if value is not None else None))
        elif part == "done":
            spread(DoneRead(job=job, record=decode(value, DoneRecord) if value is not None else None))

    store.watch(keys.root, 0, take)
