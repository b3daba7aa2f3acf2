"""How often connections are asked whether they live: often while they are few, so many a second in all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.coordinator.http import server
from elasticd.coordinator.http.server import PING, PINGS_A_SECOND


class Loop:
    """Keeps what was to be called later."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    def call_later(self, delay: float, call: object) -> None:
        self.delays.append(delay)


@pytest.mark.parametrize(("connections", "seconds"), [(1, PING), (200, PING), (1000, 1000 / PINGS_A_SECOND)])
def test_many_connections_are_asked_less_often(connections: int, seconds: float) -> None:
    """Fails where a release of uvicorn no longer schedules pings by this method."""
    kind: Any = server._websocket(lambda word: None)
    protocol = kind.__new__(kind)
    protocol.last_ping_rtt, protocol.loop = 0.0, Loop()
    protocol.guest = SimpleNamespace(door=SimpleNamespace(guest_count=connections))
    protocol.schedule_ping()
    assert protocol.loop.delays == [seconds]
