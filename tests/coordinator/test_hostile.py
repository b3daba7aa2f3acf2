"""The real leader, and a real agent, under messages that no honest process sends, over real sockets.

Nodes, workers and peers are authenticated, and hostile: malformed messages, messages out of order, huge ones.
The leader leads on, the agent serves on, and a job of other nodes makes its steps meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import get_args

import msgspec
import pytest
from elasticd_agent.snapshots import transfer
from elasticd_agent.snapshots.tls import TlsIdentity
from elasticd_agent.snapshots.transfer import SnapshotSender
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.spec.measurement import Measurement
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from elasticd.codec.message import encode
from elasticd.config.security import SecuritySection
from elasticd.config.tree import AgentSection, ClusterSection, Config
from elasticd.coordinator.daemon import Coordinator
from elasticd.coordinator.http import server as listening
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import Keys, NodeRecord, decode
from elasticd.records import encode as record
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.wire import unix_socket
from elasticd.wire.coordinator import AgentHello, together
from elasticd.wire.snapshots import Fetch, Snapped
from elasticd.wire.worker import FromWorker, Hello, Report, Welcome
from tests import sizes
from tests.agent.snapshots import snapshot
from tests.agent.support import RunningAgent, Trainer, spec
from tests.coordinator.agents import PLANNER, Agent, agent, config, get, lead, until
from tests.coordinator.test_daemon import started
from tests.machines.cast import JOB, FakeWorker, node_record
from tests.machines.hostile import Hostile, plain

#: In all; of nodes' agents, of workers, and of peers at an agent's port for snapshots.
MESSAGES = sizes.number(full=100_000, quick=3_000)
AGENTS, WORKERS, PEERS = 0.6, 0.38, 0.02
#: Messages between two steps of the other job.
BETWEEN = 300
KEYS = Keys(cluster="test")
LIMIT_MIB = 1


@asynccontextmanager
async def leading(server: MemoryServer) -> AsyncIterator[Coordinator]:
    store = MemoryStore(server)
    # Paused: what is measured here is made up, and no better plan is to be looked for.
    section, policy = SecuritySection(message_mib=LIMIT_MIB), PolicySettings(paused=True)
    coordinator = Coordinator(
        msgspec.structs.replace(config(), security=section, policy=policy), store, planner=PLANNER
    )
    await lead(coordinator)
    try:
        yield coordinator
    finally:
        await coordinator.stop()
        store.close()


class Calm:
    """A job of two honest nodes: it makes steps, and sees that they count."""

    def __init__(self, coordinator: Coordinator, agents: list[Agent], workers: list[FakeWorker]) -> None:
        self._coordinator, self._workers = coordinator, workers
        self._agents = {this.record.node: this for this in agents}
        self.steps = 0

    async def step(self) -> None:
        job = self._coordinator.leading.state.jobs[JOB]
        assert job.plan is not None
        for worker in self._workers:
            measured = Measurement(
                device=worker.device,
                plan=job.plan.number,
                step=self.steps,
                tokens=512,
                block_seconds=1.0,
                block_work=1.0,
                step_seconds=0.5,
            )
            first = worker.device == job.plan.members[0]
            loss, tokens = (2.0, 512) if first else (None, None)
            await self._agents[worker.node].tell(
                worker.up(Report(measurement=measured, loss=loss, tokens=tokens))
            )
        self.steps += 1
        await until(lambda: self._coordinator.leading.state.jobs[JOB].steps.progress.step == self.steps)

    def check(self) -> None:
        job = self._coordinator.leading.state.jobs[JOB]
        assert (job.phase, job.number, job.losses.fence, job.proposal) == (JobPhase.RUNNING, 1, None, None)
        told = {event.kind for event in self._coordinator.leading.journal.events() if event.job == JOB}
        assert not told & {"fenced", "aborted", "worker_lost", "stopped", "finished", "defect"}
        assert all(not this.closed for this in self._agents.values())


def malformed(draw: Random, message: bytes) -> bytes:
    """Often the message, else something that begins with it, is like it, or is none."""
    kind = draw.randrange(40)
    if kind == 0:
        return message[: draw.randrange(1, len(message))]
    if kind == 1:
        return draw.randbytes(draw.randrange(1, 2000))
    if kind == 2:
        return b"[" * 5000
    if kind == 3:
        at = draw.randrange(len(message))
        return message[:at] + bytes([draw.randrange(256)]) + message[at + 1 :]
    if kind == 4:
        return message.replace(b":3", b":" + b"9" * 400, 1)
    if kind == 5:
        return b'{"type":"' + b"x" * draw.choice((10, 100_000)) + b'"}'
    return message


def frames(draw: Random, hostile: Hostile) -> Iterator[bytes]:
    """What a node's agent sends on one connection: messages alone and gathered, some huge."""
    for _ in range(draw.randrange(1, 60)):
        if draw.randrange(200) == 0:
            yield b" " * ((LIMIT_MIB << 20) + 1)
        elif draw.randrange(4) == 0:
            yield malformed(draw, together([hostile.raw() for _ in range(draw.randrange(1, 20))]))
        else:
            yield malformed(draw, hostile.raw())


async def as_agent(coordinator: Coordinator, draw: Random, hostile: Hostile, node: str) -> int:
    """One connection of a hostile node; how many messages it sent."""
    sent = 0
    url = coordinator.url.replace("http", "ws") + "/v1/agent"
    with contextlib.suppress(ConnectionClosed, InvalidHandshake, OSError):
        async with connect(url, max_size=None, proxy=None) as socket:
            hearing = asyncio.create_task(_hear(socket))
            try:
                if draw.randrange(10):
                    await socket.send(encode(AgentHello(record=node_record(node))))
                for frame in frames(draw, hostile):
                    await socket.send(frame)
                    sent += max(1, frame.count(b'"body"'))
                await socket.send(encode(AgentHello(record=node_record(node))))
            finally:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
    return max(1, sent)


async def _hear(socket: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        async for _ in socket:
            pass


class Worker:
    """A hostile worker of a node with a real agent."""

    def __init__(self, draw: Random, path: str) -> None:
        self._draw, self._path = draw, path
        kinds = [*get_args(FromWorker), Snapped, Fetch]
        self._kinds = sorted(kinds, key=lambda kind: kind.__name__)

    def once(self) -> int:
        """One connection; how many messages it sent. An agent that cuts it off is right to."""
        draw, sent = self._draw, 0
        with contextlib.suppress(OSError), unix_socket.connect(self._path, 60.0) as sock:
            sock.settimeout(0.5)
            if draw.randrange(5):
                # The other device is for an honest worker in the end.
                hello = Hello(job="theirs", local_rank=0, world_size=2, pid=os.getpid(), spec=spec("theirs"))
                unix_socket.send(sock, encode(hello))
                sent += 1
            for _ in range(draw.randrange(1, 60)):
                self._say(sock)
                sent += 1
        return max(1, sent)

    def _say(self, sock: socket.socket) -> None:
        draw = self._draw
        body = plain(draw.choice(self._kinds))
        if body and draw.randrange(2):
            key = draw.choice([*body])
            body[key] = draw.choice((None, -1, 2**62, 1e308, "", "x" * 3000, [], {}, body[key]))
        data = malformed(draw, msgspec.json.encode(body))
        kind = draw.randrange(60)
        if kind == 0:
            unix_socket.send(sock, data + b" " * (2 << 20))
        elif kind == 1:
            fd = os.memfd_create("hostile")
            try:
                unix_socket.send(sock, data, fd)
            finally:
                os.close(fd)
        else:
            sock.send(data[: unix_socket.LARGEST_PACKET_BYTES], socket.MSG_NOSIGNAL)


def as_peer(draw: Random, identity: TlsIdentity, record_of: NodeRecord) -> int:
    """One stream of a node that is known in the store; how many frames it sent."""
    host, _, port = record_of.snapshots.rpartition(":")
    context = identity.context(server=False, peers=record_of.certificate)
    sent = 0
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), 60.0) as connection,
        context.wrap_socket(connection) as stream,
    ):
        for _ in range(draw.randrange(1, 10)):
            body = plain(transfer.Request)
            held = body["held"]
            held["node"], held["device"] = draw.choice((("evil", "evil/0"), ("delta", "delta/0")))
            held["size"] = draw.choice((-(2**62), -1, 0, 5, 2**20, 2**62))
            if draw.randrange(2):
                body["held"] = None
                body["echoes"], body["bytes"] = draw.choice((-1, 1, 2**62)), draw.choice((-1, 1, 2**62))
            data = malformed(draw, msgspec.json.encode(body))
            length = draw.choice((len(data), len(data), len(data), 0, 2**32 - 1))
            stream.sendall(struct.pack("!I", length) + data)
            sent += 1
        stream.sendall(draw.randbytes(draw.randrange(5000)))
    return max(1, sent)


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("defects_are_told")
def test_leader_leads_on_and_another_jobs_steps_count_whatever_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    # All of them share one event loop here: who makes up messages does not answer pings meanwhile.
    monkeypatch.setattr(listening, "PING_TIMEOUT_SECONDS", 60.0)
    path = str(tmp_path / "delta.sock")
    section = AgentSection(node="delta", socket=path, devices=2, memory=1 << 20, snapshot_mib=4)
    server = MemoryServer()
    evil = TlsIdentity.make("evil")
    known = NodeRecord(node="evil", devices=(), address="127.0.0.1", agent="evil", certificate=evil.certificate)
    MemoryStore(server).put(KEYS.node("evil"), record(known))

    async def body() -> None:
        async with (
            leading(server) as coordinator,
            agent(coordinator, node_record("alpha")) as alpha,
            agent(coordinator, node_record("beta")) as beta,
        ):
            workers = await started(server, [alpha, beta])
            await until(lambda: coordinator.leading.state.jobs[JOB].phase is JobPhase.RUNNING)
            calm = Calm(coordinator, [alpha, beta], workers)
            await calm.step()
            settings = Config(cluster=ClusterSection(name="test"), agent=section)
            running = RunningAgent(settings, MemoryStore(server))
            try:
                await until(lambda: "delta" in coordinator.leading.state.nodes)
                await attacked(coordinator, calm, path, seed)
                await survived(coordinator, path, evil)
                await calm.step()
                calm.check()
                assert running.error is None
            finally:
                await asyncio.to_thread(running.stop)

    async def attacked(coordinator: Coordinator, calm: Calm, path: str, seed: int) -> None:
        draw = Random(seed)
        hostile = Hostile(seed, ("gamma/0", "gamma/1"), ("mine", JOB), ("a", "b"))
        worker = Worker(draw, path)
        item = MemoryStore(server).get(KEYS.node("delta"))
        assert item is not None
        delta = decode(item.value, NodeRecord)
        sent = {"agents": 0, "workers": 0, "peers": 0}
        since = 0
        while (total := sum(sent.values())) < MESSAGES:
            shares = {"agents": AGENTS, "workers": WORKERS, "peers": PEERS}
            behind = min(sent, key=lambda who: sent[who] / shares[who])
            if behind == "agents":
                sent[behind] += await as_agent(coordinator, draw, hostile, "gamma")
            elif behind == "workers":
                sent[behind] += await asyncio.to_thread(worker.once)
            else:
                sent[behind] += await asyncio.to_thread(as_peer, draw, evil, delta)
            if total - since >= BETWEEN:
                since = total
                await calm.step()
                calm.check()
        assert min(sent.values()) > 0
        refused = coordinator.leading.exposition().decode()
        assert 'reason="unreadable"}' in refused

    async def survived(coordinator: Coordinator, path: str, evil: TlsIdentity) -> None:
        """An honest worker, agent and peer are served as before."""
        assert (await get(coordinator, "/readyz"))[0] == 200
        assert not coordinator._end.done()
        async with agent(coordinator, node_record("epsilon")):
            await until(lambda: "epsilon" in coordinator.leading.state.nodes)
        await asyncio.to_thread(welcomed, path)
        await asyncio.to_thread(kept, evil)

    def welcomed(path: str) -> None:
        trainer = Trainer(path)
        try:
            assert isinstance(trainer.hello(1, "honest"), Welcome)
        finally:
            trainer.close()

    def kept(evil: TlsIdentity) -> None:
        item = MemoryStore(server).get(KEYS.node("delta"))
        assert item is not None
        delta = decode(item.value, NodeRecord)
        sender, one = SnapshotSender(evil), snapshot(9, device="evil/0", node="evil")
        try:
            sender.send(one, threading.Event(), delta.snapshots, delta.certificate)
        finally:
            os.close(one.fd)
            sender.close()

    asyncio.run(body())
