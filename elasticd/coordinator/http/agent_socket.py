"""An agent's WebSocket: its hello, then its messages in order, until either side ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from elasticd.codec.message import encode
from elasticd.config.security import Role
from elasticd.coordinator.auth import ANYBODY, Caller
from elasticd.coordinator.connections import Connection
from elasticd.coordinator.http.middleware import CALLER, ROUND_TRIP
from elasticd.coordinator.leader import Leader
from elasticd.machines.coordinator import message_checks
from elasticd.store.write_allowance import Allowance
from elasticd.version import __version__
from elasticd.wire.coordinator import (
    AGENT_LEAVES,
    AgentHello,
    AgentRejected,
    FromClient,
    ToClient,
    ToLeader,
    Unread,
    all_to_leader,
)
from elasticd.wire.worker import StoreAnswer, StoreCall

#: Seconds that a new connection has to say hello.
HELLO_SECONDS = 10.0
#: Messages a second of one agent, twice as many at once; one that sends more is read more slowly, and is cut
#: off where its answers to pings are stuck behind them.
MESSAGES_PER_SECOND = 5000.0
#: Bytes a second of one agent, and bytes at once: those of a start, with each worker's spec. One that sends
#: more is read more slowly.
BYTES_PER_SECOND, BYTES_AT_ONCE = 4 << 20, 32 << 20
#: Bytes of a frame above which it is decoded beside the loop.
DECODED_BESIDE_BYTES = 64 << 10
#: Messages of one agent that are dealt with at once, before others have their turn: a node's reports of a step.
TOGETHER = 8
#: Calls on bootstrap stores that wait for their key, of a node: for each of its devices, and in all.
GETS_OF_A_DEVICE, MOST_GETS = 64, 4096
#: Seconds between looks at whether a node that had too much written to etcd is heard again.
LONGEST_PAUSE_SECONDS = 5.0
#: The code of a WebSocket that its own side closed over a message above the limit.
_TOO_BIG = 1009

#: A message of an agent; None for one that is to be skipped, which counts in the limits like another.
Taken = ToLeader | Unread | None

_log = logging.getLogger(__name__)


async def serve_agent(leading: Leader, socket: WebSocket) -> None:
    """One agent's connection, from its hello to its end."""
    await socket.accept()
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            (hello, *early), _ = await _decoded(leading, await _received(socket), first=True)
        if not isinstance(hello, AgentHello):
            await _reject(leading, socket, "silent", "an agent's first message must be its hello")
            return
        refusal = (
            _impostor(socket, hello)
            or message_checks.record_refusal(hello.record)
            or leading.connections.refusal(hello)
        )
        if refusal:
            await _reject(leading, socket, "hello", refusal)
            return
    except TimeoutError:
        await _reject(leading, socket, "silent", f"no hello came within {HELLO_SECONDS:g} s")
        return
    except msgspec.DecodeError as error:
        reason = f"the hello cannot be read ({error}): install the same release on all nodes"
        await _reject(leading, socket, "unreadable", reason)
        return
    except WebSocketDisconnect as gone:
        if gone.code == _TOO_BIG:
            leading.metrics.refused("oversized")
        return
    if hello.release != __version__:
        text = "node %s: its agent is of elasticd %s, this coordinator of %s"
        _log.info(text, hello.record.node, hello.release or "an unknown release", __version__)
    connection = leading.agent_up(hello)
    connection.round_trip = socket.scope.get(ROUND_TRIP, connection.round_trip)
    try:
        await _converse(leading, socket, connection, early)
    finally:
        leading.agent_down(connection)
        with contextlib.suppress(Exception):  # closed by the other side already
            await socket.close()


def _impostor(socket: WebSocket, hello: AgentHello) -> str:
    """Why this agent's token or certificate is not for this node, or nothing."""
    caller: Caller = socket.scope.get(CALLER) or ANYBODY
    if caller.role is not Role.AGENT or caller.name in ("", hello.record.node):
        return ""
    return (
        f"this token or certificate is for node {caller.name!r}, not for {hello.record.node!r}: give each node "
        "its own, or set node in section [agent]"
    )


async def _reject(leading: Leader, socket: WebSocket, word: str, reason: str) -> None:
    leading.metrics.refused(word)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await socket.send_bytes(encode(AgentRejected(reason=reason)))
        await socket.close(1008)


async def _converse(leading: Leader, socket: WebSocket, connection: Connection, early: Sequence[Taken]) -> None:
    """Reads and writes until either ends, or the connection is closed from here. `early`: what came along with
    the hello."""
    tasks = {
        asyncio.create_task(connection.pump(socket.send_bytes)),
        asyncio.create_task(_listen(leading, socket, connection, early)),
        asyncio.create_task(connection.closed.wait()),
    }
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, msgspec.DecodeError):
                leading.metrics.refused("unreadable")
                _log.warning("node %s: a message cannot be read: %s", connection.node, outcome)
            elif isinstance(outcome, WebSocketDisconnect):
                connection.left = outcome.code == AGENT_LEAVES
                if outcome.code == _TOO_BIG:
                    leading.metrics.refused("oversized")
                    _log.warning("node %s: a message is above [security] message_mib", connection.node)
            elif isinstance(outcome, _Impostor):
                leading.metrics.refused("impostor")
                _log.warning("node %s: its agent calls itself %s now", connection.node, outcome)
            elif isinstance(outcome, Exception):
                _log.warning("node %s: its connection ended: %r", connection.node, outcome)


class _Impostor(Exception):
    """An agent that says hello for another node."""


async def _listen(leading: Leader, socket: WebSocket, connection: Connection, early: Sequence[Taken]) -> None:
    """Hands every message over in order; a call that waits is left waiting beside the rest."""
    calls: set[asyncio.Task[None]] = set()
    most = min(MOST_GETS, GETS_OF_A_DEVICE * (len(connection.record.devices) + 1))
    allowance = Allowance(2 * MESSAGES_PER_SECOND, MESSAGES_PER_SECOND)
    bytes_allowance = Allowance(BYTES_AT_ONCE, BYTES_PER_SECOND)

    async def handle(message: ToLeader | Unread) -> None:
        if isinstance(message, AgentHello) and message.record.node != connection.node:
            raise _Impostor(message.record.node)
        if isinstance(message, FromClient) and isinstance(message.body, StoreCall) and message.body.op == "get":
            if len(calls) >= most:
                error = f"node {connection.node} waits for {most} keys of bootstrap stores already"
                answer = StoreAnswer(id=message.body.id, error=error)
                connection.send(ToClient(client=message.client, body=answer))
                return
            call = asyncio.create_task(leading.heard(connection, message))
            calls.add(call)
            call.add_done_callback(calls.discard)
        else:
            await leading.heard(connection, message)

    async def handle_all(messages: Sequence[Taken]) -> None:
        for message in messages:
            if message is not None:
                await handle(message)

    try:
        messages = early
        while True:
            for start in range(0, len(messages), TOGETHER):
                some = messages[start : start + TOGETHER]
                for _ in some:
                    while not allowance.take(1, time.monotonic()):
                        leading.metrics.refused("rate")
                        await asyncio.sleep(1 / MESSAGES_PER_SECOND)
                while wait := leading.shares.wait(connection.node):
                    leading.metrics.refused("writes")
                    await asyncio.sleep(min(wait, LONGEST_PAUSE_SECONDS))
                await leading.turns.take(partial(handle_all, some))
            messages = ()
            while wait := bytes_allowance.wait(time.monotonic()):  # with nothing of it in memory here
                leading.metrics.refused("rate")
                await asyncio.sleep(min(wait, LONGEST_PAUSE_SECONDS))
            messages, size = await _decoded(leading, await _received(socket))
            bytes_allowance.spend(size, time.monotonic())
    finally:
        for call in calls:
            call.cancel()


async def _decoded(leading: Leader, data: bytes, *, first: bool = False) -> tuple[Sequence[Taken], int]:
    """The messages of a frame, and its bytes. A large one is decoded in a thread, which lets the loop have its
    turn."""
    decode = partial(all_to_leader, data, first=first)
    if len(data) > DECODED_BESIDE_BYTES:
        return await asyncio.get_running_loop().run_in_executor(leading.decoding, decode), len(data)

    if first:
        return decode(), len(data)

    async def decoded() -> Sequence[Taken]:
        return decode()

    return await leading.turns.take(decoded), len(data)


async def _received(socket: WebSocket) -> bytes:
    """The next frame, text or bytes. Raises `WebSocketDisconnect`."""
    received = await socket.receive()
    if received["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(received.get("code", 1000))
    return received.get("bytes") or (received.get("text") or "").encode()
