"""How often connections are asked whether they live, and the end of those that do not answer."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.coordinator.http import server
from elasticd.coordinator.http.server import PING_SECONDS, PINGS_A_SECOND


class Loop:
    """Keeps what was to be called later."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.calls: list[object] = []
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: object) -> None:
        self.delays.append(delay)
        self.calls.append(call)


@pytest.mark.parametrize(
    ("connections", "seconds"), [(1, PING_SECONDS), (200, PING_SECONDS), (1000, 1000 / PINGS_A_SECOND)]
)
def test_many_connections_are_asked_less_often(connections: int, seconds: float) -> None:
    """Fails where a release of uvicorn no longer schedules pings by this method."""
    kind: Any = server._websocket(lambda word: None)
    protocol = kind.__new__(kind)
    protocol.last_ping_rtt, protocol.loop = 0.0, Loop()
    protocol.guest = SimpleNamespace(door=SimpleNamespace(guest_count=connections))
    protocol.schedule_ping()
    assert protocol.loop.delays == [seconds]


class Transport:
    """One whose client has read all but so many bytes of what was written."""

    def __init__(self, unread: int) -> None:
        self.unread, self.ended, self.pings = unread, list[str](), 0

    def is_closing(self) -> bool:
        return bool(self.ended)

    def write(self, data: bytes) -> None:
        self.pings += data == b"ping"

    def close(self) -> None:
        self.ended.append("close")

    def abort(self) -> None:
        self.ended.append("abort")

    def get_write_buffer_size(self) -> int:
        if self.ended:
            raise AttributeError("a TLS transport that was closed twice knows nothing any more")
        return self.unread


@pytest.mark.parametrize("closed", [False, True])
def test_connection_that_answers_no_ping_ends_also_where_nothing_of_what_was_written_is_read(
    closed: bool,
) -> None:
    """A transport that is closed sends what waits first: to a client that reads nothing it would never end."""
    kind: Any = server._websocket(lambda word: None)
    protocol = kind.__new__(kind)
    protocol.transport, protocol.pong_timer, protocol.pending_ping_payload = Transport(1 << 20), None, b"ping"
    if closed:
        protocol.transport.close()
    protocol.close_sent, protocol.logger = False, logging.getLogger()
    protocol.conn = SimpleNamespace(fail=lambda *reason: None, data_to_send=lambda: [b"close"])
    protocol.loop = Loop()
    protocol.loop.now = protocol._due = time.monotonic()
    protocol.loop.now += 0.01  # in time, and it has listened for longer than a ping may take
    protocol.keepalive_timeout()
    assert protocol.transport.ended == ["close", "abort"]


@pytest.mark.parametrize("by_handshake", [True, False])
def test_connection_that_is_being_closed_is_not_asked_and_ends_whatever_its_client_does(
    by_handshake: bool,
) -> None:
    kind: Any = server._websocket(lambda word: None)
    protocol = kind.__new__(kind)
    protocol.transport, protocol.loop, protocol._heard = Transport(1), Loop(), 0.0
    protocol.close_sent = by_handshake
    if not by_handshake:
        protocol.transport.close()
    protocol.send_keepalive_ping()
    assert (protocol.transport.pings, protocol.loop.delays) == (0, [server.PING_TIMEOUT_SECONDS])
    (end,) = protocol.loop.calls
    end()
    assert protocol.transport.ended[-1] == "abort"


@pytest.mark.parametrize(
    ("heard", "unread", "asked", "pings"),
    [(0.9, 0, False, 0), (0.7, 0, False, 1), (0.9, 1, False, 1), (0.9, 0, True, 1)],
)
def test_agent_that_said_something_of_late_is_not_asked_whether_it_lives(
    heard: float, unread: int, asked: bool, pings: int
) -> None:
    """Unless it does not read what was written to it, or somebody waits until it has read that."""
    kind: Any = server._websocket(lambda word: None)
    protocol = kind.__new__(kind)
    protocol.transport, protocol.loop, protocol._heard = Transport(unread), Loop(), heard
    protocol.loop.now, protocol.ping_interval, protocol.ping_timeout = 1.0, PING_SECONDS, 0.75
    protocol.conn = SimpleNamespace(send_ping=lambda payload: None, data_to_send=lambda: [b"ping"])
    protocol.close_sent = False
    if asked:
        protocol._asked = ((0.95, SimpleNamespace()),)
    protocol.send_keepalive_ping()
    assert protocol.transport.pings == pings
    if not pings:
        assert protocol.loop.calls == [protocol.send_keepalive_ping]
        assert protocol.loop.delays == [pytest.approx(PING_SECONDS - 0.1)], "an interval after its last word"
