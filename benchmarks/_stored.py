"""A large job on a real etcd, for benchmarks/load.py: it is started, planned anew, taken over, and ended.

    python benchmarks/_stored.py NODES DEVICES    # rows as JSON on the last line

Real are the coordinator (elected, with its writer), the planner's child and so the size of its answers, etcd,
and what an agent reads of the store. Emulated are the agents and workers: what they would say is given to the
leader without a network between, and they train nothing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import msgspec
from _load_job import MODEL, TOKENS
from _results import Row, row
from elasticd_agent.store_watch import StoreWatch
from elasticd_planner.spec.cluster import Device

from elasticd.config.tree import ClusterSection, Config, CoordinatorSection
from elasticd.coordinator.connections import Connection
from elasticd.coordinator.daemon import Coordinator, settings_of
from elasticd.machines.agent.state import DoneRead, Event, PlanRead, ProposalRead
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import JobSpec, Keys, NodeRecord, Proposal, StoredProposal, decode, encode
from elasticd.store.etcd import EtcdStore
from elasticd.store.protocol import Compare, Op, TransactResult, request_bytes
from elasticd.store.server import EtcdServer
from elasticd.store.session import EtcdOptions
from elasticd.wire.coordinator import AgentHello, FromClient, ToLeader
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import Finished, Hello, Prepared, StoreCall, Switched

JOB = "large"
KEYS = Keys(cluster="load")
#: Seconds until anything must have come.
PATIENCE = 300.0
#: Messages after which the leader's loop gets to do something else.
A_FEW = 64


class Counted(EtcdStore):
    """`largest`: bytes of the largest request; `transactions`: how many there were."""

    largest = transactions = 0

    def transact(self, compares: Iterable[Compare], ops: Sequence[Op]) -> TransactResult:
        compares = tuple(compares)
        self.largest = max(self.largest, request_bytes(compares, ops))
        self.transactions += 1
        return super().transact(compares, ops)


class Fleet:
    """The agents and workers of `nodes` nodes of `devices` devices each, and a leader that hears them."""

    def __init__(self, nodes: int, devices: int) -> None:
        self._records = [
            NodeRecord(
                node=f"node-{n:04d}",
                devices=tuple(Device(name=f"node-{n:04d}/{i}", memory=80 << 30) for i in range(devices)),
                address=f"10.{n >> 8}.{n & 255}.1",
                agent=f"{n:016x}",
            )
            for n in range(nodes)
        ]
        self._spec = JobSpec(
            job=JOB,
            model=MODEL,
            global_batch=8 * nodes,
            micro_batch=1,
            samples=1 << 40,
            sample_tokens=float(TOKENS),
            seed=0,
        )
        self.devices = [device.name for record in self._records for device in record.devices]
        self._connections: dict[str, Connection] = {}

    def lead(self, coordinator: Coordinator) -> None:
        """The agents connect to this one."""
        self._leading = coordinator.leading
        for record in self._records:
            self._connections[record.node] = self._leading.agent_up(AgentHello(record=record))

    async def tell(self, messages: Iterable[ToLeader]) -> None:
        for at, message in enumerate(messages):
            named = message.client.rpartition("/")[0] if isinstance(message, FromClient) else ""
            await self._leading.heard(self._connections[named or self._records[0].node], message)
            if at % A_FEW == A_FEW - 1:
                await asyncio.sleep(0)

    def joins(self) -> Iterator[FromClient]:
        count = len(self._records)
        for record in self._records:
            body = Join(job=JOB, min_nodes=count, max_nodes=count, pid=1)
            yield FromClient(client=f"{record.node}/t", job=JOB, device="", incarnation="", body=body)

    def hellos(self) -> Iterator[FromClient]:
        for record in self._records:
            for rank, device in enumerate(record.devices):
                body = Hello(
                    job=JOB, local_rank=rank, world_size=len(self.devices), pid=1000 + rank, spec=self._spec
                )
                yield self.up(device.name, body)

    def ranks(self) -> Iterator[FromClient]:
        """What the torchruns of `elasticd run`, one for each device, tell each other."""
        for n, device in enumerate(self.devices):
            call = StoreCall(
                id=n, op="set", key=f"rdzv/torchelastic/role_info/{n}", value=b"x" * 100, seconds=60.0
            )
            yield FromClient(client=device, job=JOB, device="", incarnation="", body=call)

    async def switch(self, proposal: Proposal) -> None:
        """All members prepare it, and say that they run it."""
        moved = {"pause_seconds": 0.5, "bytes_sent": 1 << 20, "bytes_lacking": 1 << 20, "bytes_state": 1 << 40}
        swapped = Switched(number=proposal.number, step=10 * proposal.number, **moved)  # type: ignore[arg-type]
        members = proposal.plan.binding
        await self.tell(self.up(device, Prepared(number=proposal.number)) for device in members)
        await self.tell(self.up(device, swapped) for device in members)

    async def drain(self) -> None:
        """The last node is to be left."""
        record = self._records[-1] = msgspec.structs.replace(self._records[-1], draining=True)
        await self._leading.heard(self._connections[record.node], AgentHello(record=record))

    def up(self, device: str, body: Hello | Prepared | Switched | Finished) -> FromClient:
        return FromClient(client=device, job=JOB, device=device, incarnation=incarnation(device), body=body)


def incarnation(device: str) -> str:
    """As an agent gives it to a worker: sixteen digits that nothing compresses."""
    return f"{hash(('incarnation', device)) & (1 << 64) - 1:016x}"


class Reader:
    """What one agent reads of the store: `events`, as they come."""

    def __init__(self, store: EtcdStore) -> None:
        self.events: list[Event] = []
        self._records = StoreWatch(
            *(store, KEYS, self.events.append),
            follow=lambda url: None,
            node_read=lambda node, record: None,
            refuse=lambda why: print(why, flush=True),
        )

    async def start(self) -> None:
        await self._records.start()

    def close(self) -> None:
        self._records.close()

    async def proposal(self, after: int) -> Proposal:
        """The next one that is open."""
        found: list[StoredProposal] = []

        def come() -> bool:
            found[:] = [
                event.proposal
                for event in self.events
                if isinstance(event, ProposalRead)
                and event.proposal is not None
                and event.proposal.head.number > after
                and event.proposal.head.status == "open"
            ]
            return bool(found)

        await until(come)
        return decode(bytes(found[0].stored), Proposal)

    async def recorded(self, number: int) -> None:
        await until(
            lambda: any(
                isinstance(event, PlanRead) and event.record is not None and event.record.plan.number == number
                for event in self.events
            )
        )

    async def done(self) -> None:
        await until(lambda: any(isinstance(event, DoneRead) and event.record for event in self.events))


async def until(come: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not come():
            await asyncio.sleep(0.005)


async def timed(work: Awaitable[object]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


class Life:
    """The job from its start to its end; each part gives its rows."""

    def __init__(self, endpoint: str, nodes: int, devices: int) -> None:
        self.options = EtcdOptions(endpoints=(endpoint,))
        self.fleet = Fleet(nodes, devices)
        self.name = f"{nodes * devices} devices"
        self.stores: list[Counted] = []
        self.failures: list[str] = []

    def store(self) -> Counted:
        self.stores.append(Counted(self.options))
        return self.stores[-1]

    async def leader(self, name: str) -> Coordinator:
        section = CoordinatorSection(name=name, host="127.0.0.1", port=0)
        config = Config(cluster=ClusterSection(name=KEYS.cluster), coordinator=section)
        # All agents and workers are one program here, which is slower than they are.
        settings = msgspec.structs.replace(
            settings_of(config), prepare_seconds=PATIENCE, reconnect_seconds=PATIENCE
        )
        coordinator = Coordinator(config, self.store(), settings=settings)
        await coordinator.start()
        return coordinator

    def seconds(self, words: str, value: float) -> Row:
        return row(f"{self.name}, etcd: {words}", round(value, 2), "s", kind="emulated")

    def size(self, words: str, value: float) -> Row:
        return row(f"{self.name}, etcd: {words}", round(value / (1 << 20), 3), "MiB", kind="emulated")

    async def rows(self) -> list[Row]:
        rows: list[Row] = []
        first = await self.leader("c0")
        reader = Reader(self.store())
        await reader.start()
        rows += await self._started(first, reader)
        rows += await self._planned_anew(first, reader)
        reader.close()
        second, more = await self._taken_over(first)
        reader = Reader(self.store())
        rows += [*more, self.seconds("an agent reads all that is stored", await timed(reader.start()))]
        rows += await self._ended(second, reader)
        reader.close()
        await self._stop(second)
        rows += self._requests()
        for store in self.stores:
            store.close()
        return rows

    async def _started(self, leader: Coordinator, reader: Reader) -> Iterable[Row]:
        self.fleet.lead(leader)
        await self.fleet.tell(self.fleet.joins())
        said = await timed(self.fleet.tell(self.fleet.hellos()))
        waited = await timed(reader.proposal(0))
        proposal = await reader.proposal(0)
        await self.fleet.switch(proposal)
        await reader.recorded(proposal.number)
        await self._phase(leader, JobPhase.RUNNING)
        ranks = await timed(self._written(leader, self.fleet.ranks()))
        return (
            self.seconds("the leader hears all workers", said),
            self.seconds("from the last worker until an agent has read the first plan", waited),
            self.seconds("all torchruns' ranks are written", ranks),
            row(
                f"{self.name}, etcd: members of the first plan", len(proposal.plan.binding), "", kind="emulated"
            ),
        )

    async def _planned_anew(self, leader: Coordinator, reader: Reader) -> Iterable[Row]:
        number = leader.leading.state.jobs[JOB].number
        await self.fleet.drain()
        waited = await timed(reader.proposal(number))
        proposal = await reader.proposal(number)
        switched = await timed(self.fleet.switch(proposal))
        await reader.recorded(proposal.number)
        await self._phase(leader, JobPhase.RUNNING)
        (history,) = [found for found in await leader.history(JOB, 0) if found.number == proposal.number]
        stored = await asyncio.to_thread(self._stored)
        return (
            self.seconds("from a node's drain until an agent has read the next plan", waited),
            self.seconds("the leader hears that all prepared and run it", switched),
            self.size("JSON of the proposal and its history", len(encode(proposal)) + len(encode(history))),
            self.size("all that is stored of the job's plans, two of them", stored),
        )

    async def _taken_over(self, first: Coordinator) -> tuple[Coordinator, Iterable[Row]]:
        before = first.leading.state.jobs[JOB]
        await self._stop(first)
        began = time.monotonic()
        second = await self.leader("c1")
        took = time.monotonic() - began
        found = second.leading.state.jobs[JOB]
        same = (found.plan, found.spec, found.phase) == (before.plan, before.spec, JobPhase.RUNNING)
        self.fleet.lead(second)
        heard = await timed(self.fleet.tell(self.fleet.hellos()))
        await self._phase(second, JobPhase.RUNNING)
        return second, (
            self.seconds("another coordinator leads, with all that was stored", took),
            self.seconds("it hears all workers again", heard),
            row(
                f"{self.name}, etcd: the next leader has plan and job as they were",
                "yes" if same else "no",
                "",
                kind="emulated",
                goal="yes",
                met=same,
            ),
        )

    async def _ended(self, leader: Coordinator, reader: Reader) -> Iterable[Row]:
        plan = leader.leading.state.jobs[JOB].plan
        assert plan is not None
        began = time.monotonic()
        await self.fleet.tell([self.fleet.up(plan.members[0], Finished(step=100))])
        await reader.done()
        took = time.monotonic() - began
        await self._written(leader, ())
        left = await asyncio.to_thread(lambda: self.stores[0].snapshot(KEYS.job(JOB, "ranks/")).items)
        return (
            self.seconds("from the last step until an agent has read the end", took),
            row(
                f"{self.name}, etcd: torchruns' ranks left behind",
                len(left),
                "",
                kind="emulated",
                goal="0",
                met=not left,
            ),
        )

    def _requests(self) -> Iterator[Row]:
        largest, most = max(store.largest for store in self.stores), self.stores[0].limits.request_bytes
        yield row(
            f"{self.name}, etcd: the largest request",
            round(largest / (1 << 20), 3),
            "MiB",
            kind="emulated",
            goal=f"<= {most / (1 << 20):g}",
            met=largest <= most,
        )
        yield row(
            f"{self.name}, etcd: leaders that ended for it, or jobs that stopped",
            len(self.failures),
            "",
            kind="emulated",
            goal="0",
            met=not self.failures,
        )

    async def _written(self, leader: Coordinator, said: Iterable[FromClient]) -> None:
        await self.fleet.tell(said)
        writer = leader.leading.writer
        assert writer is not None
        async with asyncio.timeout(PATIENCE):
            await writer.drained()

    async def _phase(self, leader: Coordinator, phase: JobPhase) -> None:
        await until(lambda: leader.leading.state.jobs[JOB].phase in (phase, JobPhase.STOPPED))
        job = leader.leading.state.jobs[JOB]
        if job.phase is not phase:
            self.failures.append(job.reason)
            raise SystemExit(f"the job stopped: {job.reason}")

    async def _stop(self, leader: Coordinator) -> None:
        if why := leader.ready():
            self.failures.append(why)
        await leader.stop()

    def _stored(self) -> int:
        """Bytes of what the leader keeps of the job, but for its torchruns' ranks."""
        found = self.stores[0].snapshot(KEYS.job(JOB, "")).items
        return sum(len(item.value) for item in found if not item.key.startswith(KEYS.job(JOB, "ranks/")))


def main(nodes: int, devices: int) -> None:
    with EtcdServer() as etcd:
        rows = asyncio.run(Life(etcd.endpoint, nodes, devices).rows())
    print(msgspec.json.encode(rows).decode(), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
