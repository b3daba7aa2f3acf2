"""A coordinator with a section [security], over the memory store, and tokens in files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from websockets.asyncio.client import connect

from elasticd.config.credentials import Credentials
from elasticd.config.security import SecuritySection
from elasticd.coordinator.daemon import Coordinator
from elasticd.store.memory import MemoryStore
from tests.coordinator.agents import PLANNER, config, lead

VIEWER, OPERATOR, AGENT, ALPHA = (f"{name}-0123456789abcdef" for name in ("view", "operate", "agent", "alpha"))


def private(path: Path, text: str) -> str:
    """A file that its owner alone may read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def tokens(folder: Path) -> SecuritySection:
    """A token of each role, and one for the agent of node alpha alone."""
    return SecuritySection(
        viewers=private(folder / "viewers", f"# who looks\n{VIEWER}\n"),
        operators=private(folder / "operators", f"alice {OPERATOR}\n"),
        agents=private(folder / "agents", f"{AGENT}\nalpha {ALPHA}  # its own\n"),
    )


@asynccontextmanager
async def secured(section: SecuritySection) -> AsyncIterator[Coordinator]:
    store = MemoryStore()
    coordinator = Coordinator(msgspec.structs.replace(config(), security=section), store, planner=PLANNER)
    await lead(coordinator)
    try:
        yield coordinator
    finally:
        await coordinator.stop()
        store.close()


def bearer(token: str) -> Credentials:
    return Credentials(token=token)


async def ask(
    coordinator: Coordinator,
    path: str,
    known: Credentials = Credentials(),  # noqa: B008 - frozen
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    content: Any = None,
) -> httpx2.Response:
    async with httpx2.AsyncClient(
        base_url=coordinator.url, trust_env=False, timeout=60, verify=known.verifying()
    ) as client:
        return await client.request(method, path, headers=known.headers() | (headers or {}), content=content)


def link(coordinator: Coordinator, known: Credentials, **options: Any) -> connect:
    """The agents' WebSocket, not yet opened."""
    url = coordinator.url.replace("http", "ws", 1) + "/v1/agent"
    options.setdefault("additional_headers", known.headers())
    return connect(url, ssl=known.context, proxy=None, **options)


def refusals(coordinator: Coordinator) -> dict[str, float]:
    """What was refused, by its word."""
    lines = coordinator.leading.exposition().decode().splitlines()
    found = [line for line in lines if line.startswith("elasticd_refused_total{")]
    return {line.partition('reason="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in found}
