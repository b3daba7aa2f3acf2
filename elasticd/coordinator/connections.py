"""The agents' connections: who is there, what waits to be sent to each, who is not let in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from elasticd.codec.message import encode, protocol_refusal
from elasticd.records import NodeRecord
from elasticd.system.network_addresses import is_loopback
from elasticd.wire.coordinator import AgentHello, FromMachine, ReportWindow, ToAgent
from elasticd.wire.launch import Happened, ReadOutput

#: Messages that may wait for a slow agent before its connection is given up; it then starts afresh.
MOST_WAITING = 10_000
#: Seconds for an agent's process to have an order: a ping behind it is answered, or its connection is given up.
REACH_SECONDS = 3.0
#: Seconds of this process that the reports of one agent's step take, and the window over which fewer agents
#: than it would be for do not spread theirs, and the longest one.
FRAME_SECONDS, LEAST_WINDOW_SECONDS, MOST_WINDOW_SECONDS = 0.6e-3, 0.05, 1.0


class Connection:
    """One agent's connection: what is sent waits here for the socket's own task."""

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.follows: set[str] = set()  # jobs whose events launchers of this node hear
        self.left = False  # the agent has said that it ends in good order
        self.closed = asyncio.Event()
        #: returns once the agent's process has read all that was written to its socket before
        self.round_trip: Callable[[], Awaitable[object]] = asyncio.Event().wait
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)

    @property
    def node(self) -> str:
        """The node's name."""
        return self.record.node

    def send(self, message: ToAgent) -> None:
        """Has a message sent; an agent that is too far behind is cut off."""
        try:
            self._waiting.put_nowait(encode(message))
        except asyncio.QueueFull:
            self.closed.set()

    async def pump(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends what waits until cancelled."""
        while True:
            await write(await self._waiting.get())
            self._waiting.task_done()

    async def reached(self) -> bool:
        """Returns True once the agent's process has all that was sent to it so far, False where its connection
        ends before that, or `REACH_SECONDS` are over."""

        async def heard() -> None:
            await self._waiting.join()
            await self.round_trip()

        hearing, ending = asyncio.create_task(heard()), asyncio.create_task(self.closed.wait())
        try:
            await asyncio.wait({hearing, ending}, timeout=REACH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            return hearing.done()
        finally:
            for task in (hearing, ending):
                task.cancel()


def _on_another_machine(one: NodeRecord, other: NodeRecord) -> bool:
    """An agent of 0.1 does not say on which it is."""
    return bool(one.host and other.host and one.host != other.host)


class Connections:
    """The live connection of each node; at most one."""

    def __init__(self) -> None:
        self._live: dict[str, Connection] = {}
        self._window_seconds = 0.0  # over which the agents spread their reports

    def __len__(self) -> int:
        return len(self._live)

    def refusal(self, hello: AgentHello) -> str:
        """Why this agent is not let in, or nothing."""
        if apart := protocol_refusal("this agent's hello to the coordinator", hello.version, hello.release):
            return apart
        other = self._live.get(hello.record.node)
        if other is not None and other.record.agent != hello.record.agent:
            return (
                f"node name {hello.record.node!r} is taken by another agent, at {other.record.address}: "
                "give each agent a name of its own (node in section [agent]), or stop the other one"
            )
        return self._apart(hello.record)

    def _apart(self, record: NodeRecord) -> str:
        """Why workers of this node and of another could not reach each other, or nothing: a loopback address is
        another one on each machine. It is the node with the loopback address that goes, whoever came first."""
        if not is_loopback(record.address):
            return ""
        for other in (connection.record for connection in self._live.values()):
            if _on_another_machine(record, other):
                return (
                    f"node {record.node!r} would listen at {record.address}, and node {other.node!r} is "
                    "another machine: their workers could not reach each other. Set address in section [agent] "
                    f"of node {record.node!r} to one of its machine's addresses, or leave it out there"
                )
        return ""

    def enter(self, record: NodeRecord) -> Connection:
        """A connection for this agent; one that it had before is closed."""
        before = self._live.get(record.node)
        if before is not None:
            before.closed.set()
        for other in [each for each in self._live.values() if is_loopback(each.record.address)]:
            if _on_another_machine(record, other.record):
                other.closed.set()  # it comes back, and is told why it cannot stay
        connection = self._live[record.node] = Connection(record)
        if not self._adjust_window() and self._window_seconds:
            connection.send(ReportWindow(seconds=self._window_seconds))
        return connection

    def leave(self, connection: Connection) -> bool:
        """Returns True if it was the node's live one: an older one may end after the next has begun."""
        connection.closed.set()
        if self._live.get(connection.node) is not connection:
            return False
        del self._live[connection.node]
        self._adjust_window()
        return True

    def _adjust_window(self) -> bool:
        """Returns whether all agents had to be sent another window for their reports. It is one to two times as
        long as this process needs for a report of each agent; it shrinks late, so that agents that come and go
        do not change it each time."""
        needed = len(self._live) * FRAME_SECONDS
        window = self._window_seconds
        if needed <= window and (needed > window / 4 or not window):
            return False
        window = 0.0 if needed < LEAST_WINDOW_SECONDS else min(MOST_WINDOW_SECONDS, 2 * needed)
        if window == self._window_seconds:
            return False
        self._window_seconds = window
        for connection in self._live.values():
            connection.send(ReportWindow(seconds=window))
        return True

    def renew(self, node: str) -> None:
        """Ends the connection of a node's agent, which comes back and says all anew."""
        if (connection := self._live.get(node)) is not None:
            connection.closed.set()

    def send(self, node: str, message: FromMachine) -> None:
        """To the node's agent; nothing where none is connected: what matters is said again."""
        connection = self._live.get(node)
        if connection is not None:
            connection.send(message)

    async def reached(self, node: str) -> bool:
        """Returns whether the node's agent has all that was sent to it so far (`Connection.reached`)."""
        connection = self._live.get(node)
        return connection is not None and await connection.reached()

    def record(self, node: str) -> NodeRecord | None:
        """Of a node whose agent is connected."""
        connection = self._live.get(node)
        return connection.record if connection is not None else None

    def ask(self, node: str, message: ReadOutput) -> None:
        """To the node's agent, which answers; nothing where none is connected."""
        connection = self._live.get(node)
        if connection is not None:
            connection.send(message)

    def happened(self, message: Happened) -> None:
        """To the agents of all nodes with launchers that follow this job."""
        for connection in self._live.values():
            if message.job in connection.follows:
                connection.send(message)

    def close(self) -> None:
        """Ends all connections."""
        for connection in self._live.values():
            connection.closed.set()
