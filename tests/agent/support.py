"""What the agent's tests talk to: a leader of a few lines on the real wire, an agent on a thread, trainers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from elasticd_agent.daemon import Agent
from elasticd_agent.worker_socket import WorkerHandlers
from elasticd_planner.spec.model import ModelSpec
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

from elasticd.codec.message import Message, encode
from elasticd.config.tree import AgentSection, ClusterSection, Config
from elasticd.machines.agent.state import Event
from elasticd.records import JobSpec, Keys
from elasticd.store.leader import Leadership, campaign
from elasticd.store.lease import LeaseKeeper
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import Store
from elasticd.store.state_file import StateFile
from elasticd.wire import unix_socket
from elasticd.wire.coordinator import AgentHello, FromClient, ToAgent, ToClient, ToLeader, all_to_leader
from elasticd.wire.rendezvous import Join, Joined, Leave
from elasticd.wire.snapshots import SnapshotInventory
from elasticd.wire.worker import Closed, Hello, Ping, Pong, StoreAnswer, StoreCall, ToWorker, Welcome, to_worker

DEADLINE = 120.0
LEASE = 60
CLUSTER = "test"
T = TypeVar("T")
M = TypeVar("M", bound=Message)


def spec(job: str) -> JobSpec:
    model = ModelSpec(name="m", embed=(), kinds=((),), layers=(0, 0), head=())
    return JobSpec(job=job, model=model, global_batch=2, micro_batch=1, samples=10, sample_tokens=8.0, seed=0)


def handlers(heard: list[Event]) -> WorkerHandlers:
    """Parts of an agent that hear nothing but events, which are kept."""
    return WorkerHandlers(
        events=heard.append,
        snapshots=lambda *_: None,
        pongs=lambda _: None,
        rounds=lambda *_: False,
        whereabouts=lambda *_: None,
        launches=lambda *_: None,
        gone=lambda _: None,
    )


class Leader:
    """Elected in a real store; keeps what it hears, answers joins once `nodes` of them came, keeps keys."""

    def __init__(self, store: Store, nodes: int = 1) -> None:
        self.heard: list[ToLeader] = []
        self.keeps: list[tuple[str, SnapshotInventory]] = []
        self.connections: list[ServerConnection] = []
        self.over = ""
        self._store, self._nodes = store, nodes
        self._joined: dict[str, tuple[ServerConnection, str]] = {}
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._server: Server = serve(self._agent, "127.0.0.1", 0, max_size=None)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        self._leadership: Leadership | None = None
        self._keeper: LeaseKeeper | None = None

    def lead(self) -> Leader:
        keys = Keys(cluster=CLUSTER)
        self._leadership = campaign(self._store, keys.leader, "mini", self.url, LEASE)
        self._keeper = LeaseKeeper(self._store, self._leadership.lease, LEASE, str).start()
        return self

    @property
    def epoch(self) -> int:
        assert self._leadership is not None
        return self._leadership.term

    def close(self) -> None:
        self.hang_up()
        self._server.shutdown()
        self._thread.join(DEADLINE)
        if self._keeper is not None:
            self._keeper.stop()
        if self._leadership is not None:
            self._leadership.resign(self._store)

    def hang_up(self) -> None:
        """Break every connection, as a network would."""
        for connection in list(self.connections):  # each takes itself out as it ends
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def send(self, message: ToAgent) -> None:
        """To every agent that is connected; each drops what is not for it."""
        for connection in list(self.connections):
            with contextlib.suppress(ConnectionClosed):
                connection.send(encode(message))

    def bodies(self, kind: type[M]) -> list[M]:
        """What clients said of this kind, through all connections."""
        return [m.body for m in list(self.heard) if isinstance(m, FromClient) and isinstance(m.body, kind)]

    def client(self, device: str) -> str:
        return next(m.client for m in reversed(self.heard) if isinstance(m, FromClient) and m.device == device)

    def _agent(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        assert connection.request.path == "/v1/agent"
        self.connections.append(connection)
        node = ""
        with contextlib.suppress(ConnectionClosed, OSError):
            for data in connection:
                for message in all_to_leader(data if isinstance(data, bytes) else data.encode()):
                    if message is not None:
                        node = self._hear(connection, node, message)
        self.connections.remove(connection)

    def _hear(self, connection: ServerConnection, node: str, message: ToLeader) -> str:
        """The node of the connection, as it is known then."""
        self.heard.append(message)
        if isinstance(message, AgentHello):
            return message.record.node
        if isinstance(message, SnapshotInventory):
            self.keeps.append((node, message))
        elif isinstance(message, FromClient):
            self._answer(connection, node, message)
        return node

    def _answer(self, connection: ServerConnection, node: str, up: FromClient) -> None:
        if isinstance(up.body, StoreCall):
            threading.Thread(target=self._call, args=(connection, up, up.body), daemon=True).start()
        elif isinstance(up.body, Leave):
            self._joined = {place: one for place, one in self._joined.items() if one[1] != up.client}
        elif isinstance(up.body, Join) and self.over:
            connection.send(encode(ToClient(client=up.client, body=Closed(reason=self.over))))
        elif isinstance(up.body, Join):
            place = node if up.body.slot is None else f"{node}/{up.body.slot}"
            self._joined[place] = (connection, up.client)
            if len(self._joined) == self._nodes:
                for rank, (_, (to, client)) in enumerate(sorted(self._joined.items())):
                    joined = Joined(node_rank=rank, nodes=self._nodes)
                    to.send(encode(ToClient(client=client, body=joined)))

    def _call(self, connection: ServerConnection, up: FromClient, call: StoreCall) -> None:
        with self._changed:
            if call.op == "set":
                self._values[call.key] = call.value
                self._changed.notify_all()
                answer = StoreAnswer(id=call.id)
            elif self._changed.wait_for(lambda: call.key in self._values, call.seconds):
                answer = StoreAnswer(id=call.id, value=self._values[call.key])
            else:
                answer = StoreAnswer(id=call.id, error="it never came")
        with contextlib.suppress(ConnectionClosed, OSError):
            connection.send(encode(ToClient(client=up.client, body=answer)))


class RunningAgent:
    """An agent on a thread of its own; `error` is what its `run` raised."""

    def __init__(
        self, config: Config, store: Store, lease_seconds: int = 60, memory: StateFile | None = None
    ) -> None:
        self.agent = Agent(config, store, lease_seconds=lease_seconds, memory=memory)
        self.error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.agent.stop)
        self.join()

    def join(self) -> None:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await self.agent.run()

        try:
            asyncio.run(main())
        except BaseException as error:
            self.error = error


class Trainer:
    """A worker's or a torchrun's end of the agent's socket, played by the test's own process."""

    def __init__(self, path: str) -> None:
        self.sock = unix_socket.connect(path, DEADLINE)
        self.sock.settimeout(DEADLINE)

    def say(self, body: Message, fd: int | None = None) -> None:
        unix_socket.send(self.sock, encode(body), fd)

    def hear(self) -> ToWorker | None:
        """The next message, but for pings."""
        return self.take()[0]

    def take(self) -> tuple[ToWorker | None, int | None]:
        """The same, and the descriptor that came with it."""
        while True:
            data, fd = unix_socket.accept(self.sock)
            message = None if data is None else to_worker(data)
            if not isinstance(message, Ping):
                return message, fd
            with contextlib.suppress(BrokenPipeError):  # an agent that ends may have asked before
                self.say(Pong())

    def hello(self, rank: int, job: str = "job") -> ToWorker | None:
        self.say(Hello(job=job, local_rank=rank, world_size=2, pid=os.getpid(), spec=spec(job)))
        return self.hear()

    def welcomed(self, rank: int, job: str = "job") -> Welcome:
        answer = self.hello(rank, job)
        assert isinstance(answer, Welcome), answer
        return answer

    def close(self) -> None:
        self.sock.close()


class Node:
    """A store, a leader and a way to start agents, all ended with the test."""

    def __init__(self, register: Callable[[Any], Any], folder: Path) -> None:
        self.register = register
        self.folder = folder
        self.server = MemoryServer()
        self.store = MemoryStore(self.server)
        self.path = str(folder / "a.sock")

    def leader(self) -> Leader:
        leader: Leader = self.register(Leader(self.store))
        return leader.lead()

    def config(self, node: str = "n0", path: str | None = None, **sections: Any) -> Config:
        agent = AgentSection(node=node, socket=path or self.path, devices=2, memory=1 << 20)
        return Config(cluster=ClusterSection(name=CLUSTER), agent=agent, **sections)

    def agent(
        self,
        node: str = "n0",
        path: str | None = None,
        ttl: int = 60,
        memory: StateFile | None = None,
        **sections: Any,
    ) -> RunningAgent:
        config = self.config(node, path, **sections)
        running: RunningAgent = self.register(RunningAgent(config, MemoryStore(self.server), ttl, memory))
        return running

    def trainer(self, path: str | None = None) -> Trainer:
        trainer: Trainer = self.register(Trainer(path or self.path))
        return trainer


@contextlib.contextmanager
def closing_all() -> Iterator[Callable[[T], T]]:
    """Register what has `close` or `stop`; it is called on every path, last first."""
    with contextlib.ExitStack() as stack:

        def register(thing: T) -> T:
            stack.callback(getattr(thing, "stop", None) or thing.close)  # type: ignore[attr-defined]
            return thing

        yield register
