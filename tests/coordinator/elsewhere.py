"""A coordinator on a thread's event loop, and its application for callers on loops of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from elasticd.config.tree import Config
from elasticd.coordinator.daemon import Coordinator
from elasticd.coordinator.http.app import application
from elasticd.store.memory import MemoryStore
from tests.coordinator.agents import PLANNER, lead

T = TypeVar("T")


class Elsewhere:
    """An ASGI application whose calls are made on another thread's loop, where what it holds lives."""

    def __init__(self, app: ASGIApp, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = app, loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            raise ValueError("served without lifespan messages, as in the product")
        here = asyncio.get_running_loop()

        def ferried(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def made(*given: Any) -> Any:
                return await call(*given)

            async def ferry(*given: Any) -> Any:
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made(*given), here))

            return ferry

        async def run() -> None:
            await self._app(scope, ferried(receive), ferried(send))

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))


class Leader:
    """A real leader over the memory store; `app` is its application, for any loop."""

    def __init__(self, coordinator: Coordinator, loop: asyncio.AbstractEventLoop) -> None:
        self.coordinator, self._loop = coordinator, loop
        self.app = Elsewhere(application(coordinator, requests_per_second=1e9), loop)

    def call(self, work: Callable[[], T]) -> T:
        """On the leader's loop."""

        async def made() -> T:
            return work()

        return self.run(made())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(180)


@contextmanager
def leading(config: Config) -> Iterator[Leader]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="leader", daemon=True)
    thread.start()
    store = MemoryStore()
    try:

        async def start() -> Coordinator:
            coordinator = Coordinator(config, store, planner=PLANNER)
            await lead(coordinator)
            return coordinator

        coordinator = asyncio.run_coroutine_threadsafe(start(), loop).result(180)
        leader = Leader(coordinator, loop)
        try:
            yield leader
        finally:
            leader.run(coordinator.stop())
    finally:
        store.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
