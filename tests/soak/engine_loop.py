"""asyncio on the simulator's clock: the coordinator's own tasks play in the order of simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar

from elasticd.simulator.engine import EventEngine

T = TypeVar("T")


class StoreThread(Executor):
    """One thread of the store's, as a daemon has it: calls follow each other, each after a drawn latency."""

    def __init__(self, engine: EventEngine, latency: Callable[[], float]) -> None:
        self._engine, self._latency = engine, latency
        self._free_at = 0.0

    def next_at(self) -> float:
        """The time at which the next call is made."""
        self._free_at = max(self._free_at, self._engine.now()) + self._latency()
        return self._free_at


class EngineLoop(asyncio.AbstractEventLoop):
    """The loop of one process. `hold` stops the process, `release` has it go on, `end` kills it."""

    def __init__(self, engine: EventEngine) -> None:
        self._engine = engine
        self._waiting: list[asyncio.Handle] | None = None
        self.ended = False
        self.errors: list[str] = []

    def hold(self) -> None:
        """Nothing runs until `release`, as in a process that is stopped."""
        self._waiting = []

    def release(self) -> None:
        """Runs the calls that were due meanwhile, in its order."""
        waiting, self._waiting = self._waiting or [], None
        for handle in waiting:
            self._engine.after(0.0, lambda handle=handle: self._run(handle))  # type: ignore[misc]

    def end(self) -> None:
        """Nothing runs any more."""
        self.ended = True

    def time(self) -> float:
        return self._engine.now()

    def get_debug(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time(), callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time(), callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._engine.call_at(when, lambda: self._run(handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """The call is made whole, at the time at which the thread comes to it."""
        assert isinstance(executor, StoreThread)
        future: asyncio.Future[T] = self.create_future()

        def call() -> None:
            try:
                answer = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(answer)

        self.call_at(executor.next_at(), call)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.ended:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The engine passes over it: `_run`."""

    def _run(self, handle: asyncio.Handle) -> None:
        if self.ended or handle.cancelled():
            return
        if self._waiting is not None:
            self._waiting.append(handle)
            return
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(before)
