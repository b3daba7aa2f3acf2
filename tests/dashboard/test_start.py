"""The dashboard's start: what it cannot use is one message or put aside, never a traceback; its limits."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from elasticd.config.tree import ConfigError, with_overrides
from elasticd.coordinator.events.event_log import EventRecord
from elasticd.dashboard.daemon import Dashboard
from elasticd.dashboard.history import opened
from tests.coordinator.agents import coordinating
from tests.dashboard.serving import Page, configured, serving


def running(body: Any) -> None:
    asyncio.run(body())


def test_a_taken_port_is_one_message_and_leaves_the_history_to_others(tmp_path: Path) -> None:
    async def body() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            config = with_overrides(configured(tmp_path), {"dashboard.port": taken.getsockname()[1]})
            with pytest.raises(ConfigError, match=r"cannot serve at 127.0.0.1:\d+ .*\[dashboard\]"):
                await Dashboard(config, "http://127.0.0.1:1").start()
        opened(tmp_path / "history.db").close()

    running(body)


def test_a_start_that_fails_after_the_history_was_opened_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: Dashboard, saved: bytes | None) -> None:
        raise ConfigError("what is wrong")

    monkeypatch.setattr(Dashboard, "_remember", fails)
    with pytest.raises(ConfigError, match="what is wrong"):
        asyncio.run(Dashboard(configured(tmp_path), "http://127.0.0.1:1").start())
    opened(tmp_path / "history.db").close()


def test_a_history_with_damaged_pages_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    writer = opened(path)
    with writer.together():
        for number in range(1, 3001):
            writer.put_event(
                EventRecord(id=number, time=time.time(), kind="slow", job="j", text="t" * 200, data={})
            )
    writer.close()
    size = os.path.getsize(path)
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(range(256)) * (size // 3 // 256))

    async def body() -> None:
        async with (
            coordinating() as coordinator,
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            assert "events" in await page.json("/api/events")

    running(body)
    assert [other.stat().st_size for other in tmp_path.glob("history.db.2*")] == [size]
