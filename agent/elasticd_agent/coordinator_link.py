"""The agent's WebSocket to the leading coordinator: follows the leader, and comes back after every break.

It carries what the machine wants sent, in order, and nothing survives a break here: the machine says again
what must not be lost when `LinkUp` tells it that a new connection stands.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException

from elasticd.backoff import Backoff
from elasticd.codec.decoding import shown, skip
from elasticd.codec.message import encode, largest_of
from elasticd.config.credentials import Credentials
from elasticd.config.tree import ConfigError
from elasticd.machines.agent.state import AgentDrained, Event, Heard, LinkDown, LinkUp
from elasticd.wire.coordinator import (
    AGENT_LEAVES,
    MOST_TOGETHER,
    AgentRejected,
    Drain,
    FromAgent,
    FromClient,
    PassedReport,
    ReportWindow,
    ToAgent,
    ToClient,
    frames,
    to_agent,
)
from elasticd.wire.worker import Report
from elasticd_agent.internal_errors import outlived

#: Seconds between attempts: doubled from the first to the second.
_BACKOFF = (0.05, 2.0)
#: Seconds for opening a connection, between pings, and for their answers.
_OPEN_SECONDS = 3.0
_PING_SECONDS = 5.0
#: Seconds for the leader to hear that this agent ends in good order.
_LEAVE_SECONDS = 1.0
_LARGEST_MESSAGE = 64 << 20
#: Seconds that a worker's report waits for those of the node's other workers, and at most where the leader has
#: so many agents that they spread their reports.
GATHER_SECONDS, MOST_GATHER_SECONDS = 0.01, 1.0

_log = logging.getLogger(__name__)


class Link:
    """Emits LinkUp, Heard and LinkDown on the running loop; `follow` says where the leader is. `orders`: by
    their class, who takes those of the leader's messages that are no matter of the machine. `known` gives what
    we show it, anew for each connection.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        orders: Mapping[type, Callable[[Any], None]],
        known: Callable[[], Credentials] = Credentials,
        *,
        place: float | None = None,
    ) -> None:
        self._emit, self._orders, self._known = emit, orders, known
        self._said = ""
        self._place = random.random() if place is None else place
        self._gather_seconds = GATHER_SECONDS
        self._url: str | None = None
        self._moved = asyncio.Event()
        self._hung_up = False
        self._outgoing: asyncio.Queue[FromAgent] | None = None
        self._connection: ClientConnection | None = None
        self._task = asyncio.create_task(self._run(), name="link to the leader")

    def follow(self, url: str | None) -> None:
        """The leader is at `url` ("http://host:port"), or there is none. Leaves a link to another one."""
        if url != self._url:
            self._url = url
            self._moved.set()

    def hang_up(self) -> None:
        """Answers a `LinkUp` of which nothing could be made: another connection is tried, a little later."""
        self._hung_up = True

    def send(self, message: FromAgent) -> None:
        """Queue a message on the present connection; without one it is dropped."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    async def leave(self) -> None:
        """Tells the leader that this agent ends in good order; `close` follows."""
        self._url = None
        if self._connection is not None:
            with suppress(Exception):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._connection.close(AGENT_LEAVES)

    async def close(self) -> None:
        """Ends the present connection, and makes no other."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = Backoff(*_BACKOFF)
        while True:
            url = self._url
            self._moved.clear()
            if url is None:
                await self._moved.wait()
                continue
            try:
                if await self._visit(url):
                    pause.reset()
            except Exception as error:
                outlived("the link to the leader", error)
            if self._url != url:
                pause.reset()
            else:
                await self._wait_moved(pause.next())

    async def _visit(self, url: str) -> bool:
        """One connection from begin to end; whether it stood."""
        address = url.replace("http", "ws", 1).rstrip("/") + "/v1/agent"
        try:
            known = self._known()
            if objection := known.objection(url):
                raise ConfigError(objection)
            connection = await connect(
                address,
                additional_headers=known.headers(),
                ssl=known.context,
                open_timeout=_OPEN_SECONDS,
                ping_interval=_PING_SECONDS,
                ping_timeout=_PING_SECONDS,
                max_size=_LARGEST_MESSAGE,
                compression=None,
                proxy=None,
            )
        except (ConfigError, InvalidStatus, ssl.SSLError) as error:
            self._complain(url, error)
            return False
        except (OSError, TimeoutError, WebSocketException, InvalidURI) as error:
            _log.debug("the leader at %s cannot be reached: %s", url, error)
            return False
        self._said, self._gather_seconds = "", GATHER_SECONDS
        self._outgoing, self._hung_up = asyncio.Queue(), False
        self._connection = connection
        _log.info("linked to the leader at %s", url)
        try:
            self._emit(LinkUp())
            if self._hung_up:
                return False
            await self._serve(connection, self._outgoing)
        finally:
            self._outgoing = self._connection = None
            if not self._hung_up:
                self._emit(LinkDown())
            _log.info("the link to the leader at %s is gone", url)
            # Not the closing handshake: a leader that is stuck would keep us here.
            connection.transport.abort()
        return True

    def _complain(self, url: str, error: Exception) -> None:
        """Of what a user must cure, once."""
        complaint = f"the leader at {url} cannot be linked to: {error}"
        if isinstance(error, InvalidStatus) and error.response.body:
            complaint = f"{complaint}: {error.response.body.decode(errors='replace')}"
        elif isinstance(error, ssl.SSLError):
            complaint = f"{complaint}; check [security] ca here, and cert and client_ca at the coordinator"
        level = logging.DEBUG if complaint == self._said else logging.WARNING
        self._said = complaint
        _log.log(level, "%s", complaint)

    async def _serve(self, connection: ClientConnection, outgoing: asyncio.Queue[FromAgent]) -> None:
        """Until the connection ends or the leader moves."""
        parts = [
            asyncio.create_task(self._read(connection)),
            asyncio.create_task(self._write(connection, outgoing)),
            asyncio.create_task(self._moved.wait()),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            results = await asyncio.gather(*parts, return_exceptions=True)
        for part, result in zip(parts, results, strict=True):
            if part in done and isinstance(result, Exception) and not isinstance(result, WebSocketException):
                raise result

    async def _read(self, connection: ClientConnection) -> None:
        async for data in connection:
            try:
                message = to_agent(data.encode() if isinstance(data, str) else data)
            except msgspec.MsgspecError as error:
                why = f"a message of the leader cannot be read and is skipped: {shown(str(error))}"
                skip("content", ("leader", why), why)
                continue
            if message is None:
                continue
            try:
                self._on_message(message)
            except Exception as error:
                outlived(f"{type(message).__name__} of the leader", error)

    def _on_message(self, message: ToAgent) -> None:
        if isinstance(message, Drain):
            self._emit(AgentDrained(on=message.on))
        elif isinstance(message, ToClient | AgentRejected):
            self._emit(Heard(message=message))
        elif isinstance(message, ReportWindow):
            self._gather_seconds = gather_seconds(message, self._place)
        else:
            self._orders[type(message)](message)

    async def _write(self, connection: ClientConnection, outgoing: asyncio.Queue[FromAgent]) -> None:
        while True:
            waiting = [await outgoing.get()]
            # The node's other workers report the same step now, and a message costs the leader more than what
            # is in it. Nothing else waits for them.
            ends = asyncio.get_running_loop().time() + self._gather_seconds
            while len(waiting) < MOST_TOGETHER and _is_report(waiting[-1]):
                try:
                    async with asyncio.timeout_at(ends):
                        waiting.append(await outgoing.get())
                except TimeoutError:
                    break
            while len(waiting) < MOST_TOGETHER and not outgoing.empty():
                waiting.append(outgoing.get_nowait())
            written = [data for message in waiting if (data := _encoded(message)) is not None]
            for frame in frames(written):
                await connection.send(frame)

    async def _wait_moved(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._moved.wait()


def _encoded(message: FromAgent) -> bytes | None:
    """None for a message that cannot be sent, with a line in the log: it costs none of the others. One that is
    larger than the leader takes would be repeated on the next connection, and end that too."""
    try:
        data = encode(message)
        if len(data) > (largest := largest_of(message)):
            raise ValueError(f"it has {len(data)} bytes, where {largest} are the most")
        return data
    except Exception as error:
        outlived(f"{type(message).__name__} to the leader", error)
        return None


def gather_seconds(window: ReportWindow, place: float) -> float:
    """Returns the seconds that reports wait in the agent whose place in the window is this (0 to 1)."""
    return min(max(GATHER_SECONDS, window.seconds * place), MOST_GATHER_SECONDS)


def _is_report(message: FromAgent) -> bool:
    return isinstance(message, PassedReport) or (
        isinstance(message, FromClient) and isinstance(message.body, Report)
    )
