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
from elasticd.coordinator.http import server
from elasticd.coordinator.http.server import FRAMES_AT_ONCE, PARSED_TOGETHER, configured

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


async def opened(transport: Transport, refused: Callable[[str], None], app: Callable[..., Any]) -> Any:
    """The server's protocol of one connection, whose WebSocket stands."""
    config = configured(app, SecuritySection(), None, refused)
    config.load()
    protocol: Any = server._websocket(refused)(
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


def flood(piece: bytes, first: bytes = b"") -> tuple[int, Transport, Counter[str], list[Any]]:
    """One read of a socket with nothing but these pieces. Returns the frames that the longest turn parsed."""
    refusals: Counter[str] = Counter()
    transport, heard = Transport(), list[Any]()

    async def hear(scope: Any, receive: Any, send: Any) -> None:
        """Takes messages, as the application does."""
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            heard.append(message.get("bytes"))

    async def body() -> int:
        protocol = await opened(transport, lambda word: refusals.update([word]), hear)
        parsed: list[int] = [0]
        received, parse = protocol.conn.receive_data, protocol._parse

        def counting(data: bytes) -> None:
            parsed[-1] += len(data)
            received(data)

        def turn(data: bytes) -> None:
            parsed.append(0)
            parse(data)

        protocol.conn.receive_data, protocol._parse = counting, turn
        server_time = SimpleNamespace(monotonic=lambda: sum(parsed) / PARSED_TOGETHER * 0.003)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "time", server_time)  # 3 ms for each part, however slow this machine is
            protocol.data_received(first + piece * (READ // len(piece)))
            await turns(lambda: transport.aborted or (transport.reads and not protocol._unparsed))
        protocol.connection_lost(None)
        await asyncio.sleep(0)
        return max(parsed)

    return asyncio.run(body()), transport, refusals, heard


CONTROL = {
    "pings": (frame(Opcode.PING), b""),
    "pongs": (frame(Opcode.PONG), b""),
    "pieces": (frame(Opcode.CONT, fin=False), frame(Opcode.BINARY, b"[", fin=False)),
}


@pytest.mark.parametrize("kind", CONTROL)
def test_client_that_sends_too_many_frames_that_are_no_message_is_dropped(kind: str) -> None:
    piece, first = CONTROL[kind]
    longest, transport, refusals, heard = flood(piece, first)
    assert longest <= 3 * PARSED_TOGETHER
    assert (transport.aborted, refusals["rate"], heard) == (True, 1, [])
    assert transport.written < 64 * FRAMES_AT_ONCE, "answers that nobody reads are few"


@pytest.mark.parametrize("content", [b"", b'{"type":"x"}', b"x" * 20_000])
def test_messages_of_one_read_are_parsed_in_turns_and_all_of_them_come_in_order(content: bytes) -> None:
    count = READ // len(frame(Opcode.BINARY, content))
    longest, transport, refusals, heard = flood(frame(Opcode.BINARY, content))
    assert longest <= 3 * PARSED_TOGETHER
    assert not transport.aborted
    assert not refusals
    assert heard == [content] * count
    assert transport.reads, "once all is taken, more is read"
