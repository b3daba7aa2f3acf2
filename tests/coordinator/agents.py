"""An agent's side of the WebSocket, and a coordinator over the memory store on a free port."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import httpx2
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from elasticd.codec.message import encode
from elasticd.config.credentials import Credentials
from elasticd.config.tree import ChaosSection, ClusterSection, Config, CoordinatorSection
from elasticd.coordinator import election
from elasticd.coordinator.daemon import Coordinator
from elasticd.records import NodeRecord
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.wire.coordinator import AgentHello, AgentRejected, FromClient, ToClient, ToLeader, to_agent
from elasticd.wire.rendezvous import Join


def config(*, chaos: bool = True, port: int = 0) -> Config:
    return Config(
        cluster=ClusterSection(name="test"),
        coordinator=CoordinatorSection(name="c0", port=port),
        chaos=ChaosSection(enabled=chaos),
    )


#: The planner, from when it is asked first: most tests ask for no plan, and its imports take half a second.
PLANNER = (
    *(sys.executable, "-I", "-S", "-c"),
    "import os, select, sys; select.select([0], [], []); "
    "os.execv(sys.executable, [sys.executable, '-m', 'elasticd_planner'])",
)

#: Seconds of a leader's lease in tests: longer than a busy machine stops this process for.
LONG = 60


async def lead(coordinator: Coordinator, lease_seconds: int = LONG) -> None:
    """Starts it; it looks after its lease three times in `lease_seconds`."""
    with patch.object(election, "LEASE_SECONDS", lease_seconds):
        await coordinator.start()


@asynccontextmanager
async def coordinating(
    server: MemoryServer | None = None,
    *,
    chaos: bool = True,
    planner: tuple[str, ...] = PLANNER,
    lease_seconds: int = LONG,
) -> AsyncIterator[Coordinator]:
    store = MemoryStore(server)
    coordinator = Coordinator(config(chaos=chaos), store, planner=planner)
    await lead(coordinator, lease_seconds)
    try:
        yield coordinator
    finally:
        await coordinator.stop()
        store.close()


async def until(reached: Callable[[], bool], seconds: float = 180.0) -> None:
    """Lets the other tasks of this loop run until something is true (`elasticd.testing.waiting` waits for other
    threads and processes)."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


@dataclass
class Agent:
    """One connection: what came is in `heard`, `rejected` says why we were not let in."""

    record: NodeRecord
    socket: ClientConnection
    heard: list[ToClient] = field(default_factory=list)
    rejected: str = ""
    closed: bool = False
    on_down: Callable[[ToClient], Awaitable[None]] | None = None

    async def tell(self, message: ToLeader) -> None:
        await self.socket.send(encode(message))

    async def takes_part(self, job: str) -> None:
        """A torchrun of this node asks to take part in a job, and waits for others."""
        body = Join(job=job, min_nodes=9, max_nodes=9, pid=1)
        await self.tell(FromClient(client="asks", job=job, device="", incarnation="", body=body))

    async def listen(self) -> None:
        try:
            async for data in self.socket:
                message = to_agent(data if isinstance(data, bytes) else data.encode())
                if isinstance(message, AgentRejected):
                    self.rejected = message.reason
                    continue
                self.heard.append(message)
                if self.on_down is not None:
                    await self.on_down(message)
        except ConnectionClosed:
            pass
        finally:
            self.closed = True

    def bodies(self, client: str) -> list[Any]:
        return [down.body for down in self.heard if down.client == client]


@asynccontextmanager
async def agent(
    coordinator: Coordinator, record: NodeRecord, *, version: int | None = None, release: str = ""
) -> AsyncIterator[Agent]:
    url = coordinator.url.replace("http", "ws") + "/v1/agent"
    async with connect(url) as socket:
        hello = AgentHello(record=record, release=release)
        if version is not None:
            hello = msgspec.structs.replace(hello, version=version, release=f"{version}.0.0")
        this = Agent(record=record, socket=socket)
        await this.tell(hello)
        listening = asyncio.create_task(this.listen())
        try:
            yield this
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


def _client(**options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(trust_env=False, timeout=60, verify=Credentials().verifying(), **options)


async def get(coordinator: Coordinator, path: str) -> tuple[int, Any]:
    async with _client(base_url=coordinator.url) as client:
        answer = await client.get(path)
        return answer.status_code, answer.json()


async def post(coordinator: Coordinator, path: str, body: Any) -> tuple[int, Any]:
    async with _client(base_url=coordinator.url) as client:
        answer = await client.post(path, content=msgspec.json.encode(body))
        return answer.status_code, answer.json()
