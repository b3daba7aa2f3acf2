"""A dashboard before a real coordinator, and a client that is one browser."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from elasticd.config.credentials import Credentials
from elasticd.config.security import SecuritySection
from elasticd.config.tree import Config, with_overrides
from elasticd.coordinator.daemon import Coordinator
from elasticd.dashboard.daemon import Dashboard
from tests.coordinator.agents import config, until
from tests.coordinator.secured import VIEWER, private

#: Seconds that something may take on a busy machine.
SOON = 60.0


def configured(folder: Path, *, token: str = "") -> Config:
    """A dashboard's configuration, with its own token where there is one."""
    found = with_overrides(config(), {"dashboard.port": 0, "dashboard.history": str(folder / "history.db")})
    if token:
        section = SecuritySection(token_file=private(folder / "own-token", token))
        found = msgspec.structs.replace(found, security=section)
    return found


@asynccontextmanager
async def serving(
    coordinator: Coordinator | str, folder: Path, *, secured: bool = False
) -> AsyncIterator[Dashboard]:
    """A dashboard that has heard all that the leader knows."""
    url = coordinator if isinstance(coordinator, str) else coordinator.url
    dashboard = Dashboard(configured(folder, token=VIEWER if secured else ""), url)
    await dashboard.start()
    try:
        await until(lambda: dashboard.board.known.cluster.leader.epoch > 0, SOON)
        yield dashboard
    finally:
        await dashboard.stop()


class Page:
    """A browser's requests, with its cookies."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx2.AsyncClient(
            base_url=url, trust_env=False, timeout=60, verify=Credentials().verifying()
        )

    async def __aenter__(self) -> Page:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str, **options: Any) -> httpx2.Response:
        return await self._client.get(path, **options)

    async def json(self, path: str) -> Any:
        answer = await self._client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()

    async def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return await self._client.post(path, json=body, **options)

    async def delete(self, path: str) -> httpx2.Response:
        return await self._client.delete(path)

    async def until(self, path: str, wanted: Any) -> Any:
        """The JSON of a path, once it is as `wanted` says."""

        async def look() -> Any:
            while not wanted(found := await self.json(path)):
                await asyncio.sleep(0.05)
            return found

        return await asyncio.wait_for(look(), SOON)

    @property
    def cookies(self) -> Any:
        return self._client.cookies


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    """As browsers have it: texts may hold what Unicode calls a line's end."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)


class Stream:
    """A browser's stream of events, on a thread of its own."""

    def __init__(self, url: str, *, last: str = "", cookies: Any = None) -> None:
        self.heard: list[tuple[str, str, Any]] = []  # id, event, data
        self.status = 0
        self._client = httpx2.Client(
            base_url=url, trust_env=False, timeout=60, verify=Credentials().verifying(), cookies=cookies
        )
        self._last = last
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        headers = {"Last-Event-ID": self._last} if self._last else {}
        with suppress(Exception), self._client.stream("GET", "/api/live", headers=headers) as answer:
            self.status = answer.status_code
            number = event = ""
            for line in _lines(answer.iter_bytes()):
                key, _, value = line.partition(": ")
                if key == "id":
                    number = value
                elif key == "event":
                    event = value
                elif key == "data":
                    self.heard.append((number, event, json.loads(value)))

    def of(self, kind: str) -> list[Any]:
        return [data for _, event, data in self.heard if event == kind]

    def close(self) -> None:
        with suppress(Exception):
            self._client.close()


@contextmanager
def streaming(url: str, **options: Any) -> Iterator[Stream]:
    stream = Stream(url, **options)
    try:
        yield stream
    finally:
        stream.close()
