"""The collector of a leader's process: no full collection by itself, and none of the garbage stays."""

from __future__ import annotations

import asyncio
import gc
import weakref

from elasticd.coordinator.garbage_collector import collecting
from tests.coordinator.agents import until


class Knot:
    """An object that is never freed by counting references."""

    def __init__(self) -> None:
        self.self = self


def test_cycles_are_freed_without_a_full_collection_of_the_interpreters_own() -> None:
    async def body() -> None:
        before = gc.get_threshold()
        task = asyncio.create_task(collecting(0.02, 3600.0))
        await asyncio.sleep(0)
        assert gc.get_threshold()[2] > 1_000_000
        assert gc.get_freeze_count() > 0
        new = weakref.ref(Knot())
        await until(lambda: new() is None, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() == 0

    asyncio.run(body())


def test_what_became_garbage_after_it_was_put_aside_is_freed_when_everything_is_looked_at() -> None:
    async def body() -> None:
        kept = Knot()
        old = weakref.ref(kept)
        task = asyncio.create_task(collecting(0.02, 0.5))
        await asyncio.sleep(0.1)
        del kept
        await until(lambda: old() is None, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())
