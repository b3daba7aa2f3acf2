"""Floods at the agents' WebSocket: however much one client sends, others have their turn soon."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.frames import Frame, Opcode

from elasticd.config.security import SecuritySection
from elasticd.coordinator.fair_queue import RoundShare
from elasticd.coordinator.http import server
from elasticd.coordinator.http.server import FRAMES_AT_ONCE, PARSE_SECONDS, PARSED_TOGETHER, configured

#: Bytes of one read of a socket; asyncio takes up to four times as many.
READ = 64 << 10
OPENING = (
    b"GET /v1/agent HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)


class Transport:
    """Counts what is written, and notes whether more is read."""

    def __init__(self) -> None:
        self.written, self.reads, self.aborted, self.closed = 0, True, False, False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes) -> None:
        self.written += len(data)

    def is_closing(self) -> bool:
        return self.aborted or self.closed

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def get_write_buffer_size(self) -> int:
        return 0


def frame(opcode: Opcode, content: bytes = b"", *, fin: bool = True) -> bytes:
    return Frame(opcode, content, fin).serialize(mask=True)


async def opened(websocket: Any, config: Any, transport: Transport) -> Any:
    """The server's protocol of one connection, whose WebSocket stands."""
    protocol: Any = websocket(
        config=config,
        server_state=SimpleNamespace(connections=set(), tasks=set(), default_headers=[]),
        app_state={},
    )
    protocol.guest = SimpleNamespace(door=SimpleNamespace(guest_count=1), leave=lambda: None)
    protocol.connection_made(transport)
    protocol.data_received(OPENING)
    await turns(lambda: protocol.handshake_complete)
    protocol.stop_keepalive()  # its pings go by the clock, and nobody answers them here
    return protocol


async def turns(reached: Callable[[], bool]) -> None:
    """Lets the loop turn until something is so."""
    for _ in range(100_000):
        if reached():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


class Flooded:
    """Connections each of which sends one read of a socket with nothing but these pieces, all at once."""

    def __init__(self, piece: bytes, first: bytes = b"", connections: int = 1) -> None:
        self.refusals: Counter[str] = Counter()
        self.transports = [Transport() for _ in range(connections)]
        self.heard: list[list[Any]] = []  # by connection
        self.parsed = [0]  # bytes of each round of the loop
        asyncio.run(self._run(first + piece * (READ // len(piece))))

    async def _hear(self, scope: Any, receive: Any, send: Any) -> None:
        """Takes messages, as the application does."""
        await receive()
        await send({"type": "websocket.accept"})
        heard = list[Any]()
        self.heard.append(heard)
        while (message := await receive())["type"] == "websocket.receive":
            heard.append(message.get("bytes"))

    def _part_parsed(self, data: bytes) -> None:
        self.parsed[-1] += len(data)

    async def _count_rounds(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.parsed.append(0)

    async def _run(self, data: bytes) -> None:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            await self._hear(scope, receive, send)

        config = configured(application, SecuritySection(), None, lambda word: self.refusals.update([word]))
        config.load()
        # 3 ms for each part, however slow this machine is.
        rounds = RoundShare(PARSE_SECONDS, lambda: sum(self.parsed) / PARSED_TOGETHER * 0.003)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "RoundShare", lambda seconds: rounds)
            websocket = server._websocket(lambda word: self.refusals.update([word]))
        protocols = [await opened(websocket, config, transport) for transport in self.transports]
        for protocol in protocols:
            receive = protocol.conn.receive_data

            def counting(data: bytes, receive: Any = receive) -> None:
                self._part_parsed(data)
                receive(data)

            protocol.conn.receive_data = counting
        counter = asyncio.create_task(self._count_rounds())
        await asyncio.sleep(0)
        for protocol in protocols:
            protocol.data_received(data)
        await turns(
            lambda: all(
                transport.aborted or (transport.reads and not protocol._unparsed)
                for transport, protocol in zip(self.transports, protocols, strict=True)
            )
        )
        counter.cancel()
        for protocol in protocols:
            protocol.connection_lost(None)
        await asyncio.sleep(0)


CONTROL = {
    "pings": (frame(Opcode.PING), b""),
    "pongs": (frame(Opcode.PONG), b""),
    "pieces": (frame(Opcode.CONT, fin=False), frame(Opcode.BINARY, b"[", fin=False)),
}


#: Connections that flood at once: what one may do in a round of the loop is what all of them may.
TOGETHER = [1, 5]


@pytest.mark.parametrize("connections", TOGETHER)
@pytest.mark.parametrize("kind", CONTROL)
def test_clients_that_send_too_many_frames_that_are_no_message_are_dropped(kind: str, connections: int) -> None:
    piece, first = CONTROL[kind]
    flooded = Flooded(piece, first, connections)
    assert max(flooded.parsed) <= 3 * PARSED_TOGETHER
    assert all(transport.aborted for transport in flooded.transports)
    assert flooded.refusals["rate"] == connections
    assert flooded.heard == [[]] * connections
    for transport in flooded.transports:
        assert transport.written < 64 * FRAMES_AT_ONCE, "answers that nobody reads are few"


@pytest.mark.parametrize("connections", TOGETHER)
@pytest.mark.parametrize("content", [b"", b'{"type":"x"}', b"x" * 20_000])
def test_messages_are_parsed_in_turns_and_all_of_them_come_in_order(content: bytes, connections: int) -> None:
    count = READ // len(frame(Opcode.BINARY, content))
    flooded = Flooded(frame(Opcode.BINARY, content), connections=connections)
    assert max(flooded.parsed) <= 3 * PARSED_TOGETHER
    assert not any(transport.aborted for transport in flooded.transports)
    assert not flooded.refusals
    assert flooded.heard == [[content] * count] * connections
    assert all(transport.reads for transport in flooded.transports), "once all is taken, more is read"


def test_a_connection_that_sends_little_is_parsed_after_one_part_of_each_that_floods() -> None:
    """They have their turns one by one, so that the quiet one does not wait for all that others sent."""
    done = list[str]()
    left = dict.fromkeys("abc", 100) | {"quiet": 1}

    async def body() -> None:
        rounds = RoundShare(2.5, clock=lambda: float(len(done)))

        def parts(name: str) -> Callable[[], bool]:
            def part() -> bool:
                done.append(name)
                left[name] -= 1
                return left[name] > 0

            return part

        for name in left:
            rounds.do(parts(name))
        assert len(done) == 3, "the share of this round"
        await turns(lambda: not left["quiet"])
        assert done.index("quiet") <= 6
        await turns(lambda: not any(left.values()))

    asyncio.run(body())
