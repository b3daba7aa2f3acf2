"""The dashboard's start: what it cannot use is one message or put aside, never a traceback; its limits."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elasticd.config.tree import ConfigError, with_overrides
from elasticd.dashboard import app, daemon
from elasticd.dashboard.daemon import Dashboard, most_connections
from elasticd.dashboard.history import opened
from elasticd.wire.event_record import EventRecord
from tests.coordinator.agents import coordinating, until
from tests.dashboard.serving import SOON, Page, configured, serving


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


@pytest.mark.parametrize("saved", [b'{"name":"\xff"}', b'{"newer":' + b"[" * 3000 + b"]" * 3000 + b"}", b"[]"])
def test_a_view_of_before_that_cannot_be_read_is_said_and_the_dashboard_starts(
    saved: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = opened(tmp_path / "history.db")
    writer.put_meta("view", zlib.compress(saved))
    writer.close()

    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path):
            pass

    running(body)
    assert "what was known of the cluster before cannot be read" in caplog.text


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


# -- limits of connections -----------------------------------------------------------------------------------


async def connected(url: str, text: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(text.replace("\n", "\r\n").encode())
    return reader, writer


def test_connections_that_ask_for_nothing_are_dropped_and_too_many_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "MOST_CONNECTIONS", 20)
    monkeypatch.setattr(daemon, "SILENT_SECONDS", 1.0)

    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            silent = [await connected(dashboard.url, "GET / HT") for _ in range(40)]
            # Each is ended by the dashboard, which then answers again.
            ends = [asyncio.wait_for(reader.read(), SOON) for reader, _ in silent]
            for end in await asyncio.gather(*ends, return_exceptions=True):
                assert end == b"" or isinstance(end, ConnectionError), end
            async with Page(dashboard.url) as page:
                await page.json("/api/cluster")
            for _, writer in silent:
                writer.close()

    running(body)


def test_a_browser_that_reads_nothing_loses_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "UNREAD_SECONDS", 0.5)

    class Long(msgspec.Struct):
        text: str = "x" * 500_000

    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            name = dashboard.url.partition("//")[2]
            _, writer = await connected(dashboard.url, f"GET /api/live HTTP/1.1\nHost: {name}\n\n")
            streams = dashboard.board.streams
            await until(lambda: len(streams) == 1, SOON)
            ends = time.monotonic() + SOON
            while len(streams) and time.monotonic() < ends:
                streams.tell("leader", Long())
                await asyncio.sleep(0.05)
            assert not len(streams)
            writer.close()

    running(body)


def test_a_body_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)

    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            name = dashboard.url.partition("//")[2]
            head = (
                f"POST /session HTTP/1.1\nHost: {name}\nContent-Type: application/json\nContent-Length: 99\n\n"
            )
            reader, writer = await connected(dashboard.url, head)
            assert b" 408 " in await asyncio.wait_for(reader.readline(), SOON)
            writer.close()

    running(body)


def test_connections_leave_files_for_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 896), (65536, 1024), (100, 16), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert most_connections() == most
