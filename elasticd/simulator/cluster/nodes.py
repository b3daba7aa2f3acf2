"""Nodes: each with the real machine of an agent, a torchrun, and the workers that torchrun started.

What is shared, so that thousands of devices stay cheap: one watch of the store reads each record once for
all agents, and a worker's work is done by the worker group, which knows what all of them do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
from elasticd_planner.spec.cluster import Node as NodeShape

from elasticd.codec.record_parts import Shelf
from elasticd.machines.agent import machine
from elasticd.machines.agent.state import (
    AgentPhase,
    AgentSend,
    AgentState,
    AgentTell,
    DoneRead,
    Effect,
    Ended,
    Event,
    FenceRead,
    Heard,
    LeaderRead,
    LinkDown,
    LinkUp,
    Opened,
    PlanRead,
    ProposalRead,
    Said,
    Stop,
)
from elasticd.records import DoneRecord, Fence, JobSpec, Keys, NodeRecord, PlanRecord, decode, decode_proposal
from elasticd.simulator.cluster.worker import SimulatedWorker, SimulationError
from elasticd.simulator.cluster.workers import WorkerGroup
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import WatchEvent, WatchItem
from elasticd.wire.coordinator import ToClient, ToLeader
from elasticd.wire.rendezvous import Join, Joined
from elasticd.wire.worker import FromItsAgent, FromWorker, Hello, Rejected


class Node:
    """An agent's machine and what it drives. `tell` takes its words to the leader, `refused` hears why its
    torchrun was turned away. While `apart` it reads nothing of the store, and reads all when it is back. Its
    torchrun `asks` until it has heard that it takes part."""

    def __init__(
        self,
        shape: NodeShape,
        worker_group: WorkerGroup,
        tell: Callable[[str, ToLeader], None],
        refused: Callable[[str, str], None],
    ) -> None:
        self.name = shape.name
        self.workers: dict[str, SimulatedWorker] = {}
        self.apart = False
        self._shape, self._worker_group, self._tell, self._refused = shape, worker_group, tell, refused
        self._events: deque[Event] = deque()
        self._missed: list[Event] = []
        self._torchrun = ""
        self.asks = False
        self._size = 0
        self._boots = 0
        self.state = self._booted()

    def _booted(self) -> AgentState:
        """An agent that knows nothing yet."""
        self._boots += 1
        record = NodeRecord(
            node=self.name,
            devices=self._shape.devices,
            address="127.0.0.1",
            agent=f"a{self._boots}-{self.name}",
            emulated=True,
        )
        return AgentState(record=record)

    def _reboot(self, factors: Mapping[str, float]) -> None:
        """Another agent, which knows what is in the store, and how slow devices are to be."""
        was = self.state
        self._missed.clear()
        self.state = replace(
            self._booted(),
            epoch=was.epoch,
            proposals=was.proposals,
            plans=was.plans,
            fences=was.fences,
            done=was.done,
            factors=factors,
        )

    def emit(self, event: Event) -> None:
        """One event after the other: what an effect emits waits until the effects before it are done."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            self.state, effects = machine.step(self.state, self._events[0], 0.0)
            for effect in effects:
                self._perform(effect)
            self._events.popleft()

    @property
    def runs(self) -> bool:
        """True if a torchrun is here."""
        return self._torchrun != ""

    def torchrun(self, spec: JobSpec, pid: int, most: int) -> None:
        """A torchrun on this node asks to take part in a job of `most` nodes at most; its workers start once it
        has heard that it does."""
        self._spec, self._pid = spec, pid
        self._torchrun = f"t{self.name}-{pid}"
        self.asks = True
        join = Join(job=spec.job, min_nodes=1, max_nodes=most, pid=pid)
        self.emit(Opened(client=self._torchrun, body=join, pid=pid, incarnation=self._torchrun))

    def end(self, how: str) -> None:
        """All processes that torchrun started here end, and torchrun with them."""
        clients, gone = (*self.workers, self._torchrun), list(self.workers.values())
        self.workers, self._torchrun, self.asks = {}, "", False
        for worker in gone:
            self._worker_group.died(worker, told=True)
        for client in clients:
            if client:
                self.emit(Ended(client=client, how=how))

    def crash(self) -> None:
        """The whole machine is gone; what boots later knows what is in the store and nothing else."""
        gone, self.workers = list(self.workers.values()), {}
        self._torchrun, self.asks = "", False
        for worker in gone:
            self._worker_group.died(worker, told=False)
        self._reboot({})

    def restart(self) -> None:
        """Its agent dies and another is started: the workers live, come back to it, and say again what holds.
        torchrun asks again where it waits for an answer."""
        was = self.state
        self._reboot(was.factors)
        for client in was.clients.values():
            body = client.opening
            if isinstance(body, Hello):
                body = msgspec.structs.replace(body, incarnation=client.incarnation)
            elif not self.asks:
                continue
            self.emit(Opened(client=client.id, body=body, pid=body.pid, incarnation=client.incarnation))
            for statement in client.said:
                self.emit(Said(client=client.id, body=statement))

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
        """True if its agent has a link to a leader."""
        return self.state.phase is AgentPhase.LINKED

    def link(self, up: bool) -> None:
        """Tells its agent that the link to the leader is there, or lost. An agent that knows this already is
        not told again."""
        if up != self.linked:
            self.emit(LinkUp() if up else LinkDown())

    def down(self, message: ToClient) -> None:
        """Delivers a leader's message to its agent. A message that arrives after the link broke is lost."""
        if self.linked:  # what was on its way when the link broke is lost
            self.emit(Heard(message=message))

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, AgentTell):
            self._tell(self.name, effect.message)  # type: ignore[arg-type]  # nobody here encodes a report
        elif isinstance(effect, AgentSend):
            self._deliver(effect.client, effect.body)
        elif isinstance(effect, Stop):
            raise SimulationError(f"node {self.name} was turned away: {effect.reason}")
        # Member keys are for people; the leader hears of workers from the agents.

    def _deliver(self, client: str, body: FromItsAgent) -> None:
        """Gives a worker or the torchrun a message. A torchrun that is to end does so; its workers get messages
        of their own."""
        if client in self.workers:
            self.workers[client].receive(body)
        elif isinstance(body, Joined) and self.asks:  # a new leader answers again what it asked an old one
            self.asks = False
            self._start(body.nodes)
        elif isinstance(body, Rejected):
            self._refused(self.name, body.reason)

    def _start(self, nodes: int) -> None:
        self._size = nodes * len(self._shape.devices)
        for rank, device in enumerate(self._shape.devices):
            name = device.name
            worker = SimulatedWorker(
                name,
                f"w{name}-{self._pid}",
                run=self._worker_group.run,
                steps=lambda: self._worker_group.step,
                emit=self._said,
                renew=self._renew,
            )
            self.workers[worker.client] = worker
            self._open(worker, rank)

    def _open(self, worker: SimulatedWorker, rank: int) -> None:
        spec, pid = self._spec, self._pid + 1 + rank
        body = Hello(job=spec.job, local_rank=rank, world_size=self._size, pid=pid, spec=spec)
        incarnation = f"i{pid}.{worker.incarnations}-{worker.device}"
        self.emit(Opened(client=worker.client, body=body, pid=pid, incarnation=incarnation))

    def _said(self, worker: SimulatedWorker, body: FromWorker) -> None:
        self.emit(Said(client=worker.client, body=body))

    def _renew(self, worker: SimulatedWorker) -> None:
        """The same process on a new connection, as another incarnation."""
        del self.workers[worker.client]
        self.emit(Ended(client=worker.client, how="it was fenced off"))
        worker.client = f"w{worker.device}-{self._pid}.{worker.incarnations}"
        self.workers[worker.client] = worker
        rank = next(rank for rank, device in enumerate(self._shape.devices) if device.name == worker.device)
        self._open(worker, rank)


def read_for_all(
    store: MemoryStore, keys: Keys, nodes: Sequence[Node], later: Callable[[Callable[[], None]], object]
) -> None:
    """Watches the store on behalf of all agents: each record is read once, and handed on as an event."""

    shelf = Shelf(keys.jobs)

    def spread(event: Event) -> None:
        def emit() -> None:
            for node in nodes:
                node.read(event)

        later(emit)

    def take(item: WatchItem) -> None:
        if not isinstance(item, WatchEvent):
            raise SimulationError("the store forgot what its watch had not read")
        value = item.item.value if item.kind == "put" else None
        at = item.mod_revision
        if shelf.take(item.key, value):
            return
        job, _, part = item.key.removeprefix(keys.jobs).rpartition("/")
        parts = shelf.of(item.key)
        if item.key == keys.leader:
            if value is not None:
                spread(LeaderRead(epoch=item.item.create_revision))
        elif part == "proposal":
            proposal = decode_proposal(value, parts) if value is not None else None
            spread(ProposalRead(job=job, proposal=proposal, revision=at))
        elif part == "plan":
            plan = decode(value, PlanRecord, parts) if value is not None else None
            spread(PlanRead(job=job, record=plan, revision=at))
        elif part == "fence":
            fence = decode(value, Fence, parts) if value is not None else None
            spread(FenceRead(job=job, record=fence, revision=at))
        elif part == "done":
            done = decode(value, DoneRecord) if value is not None else None
            spread(DoneRead(job=job, record=done, revision=at))

    store.watch(keys.root, 0, take)
