"""What comes to a coordinator in the midst of something else holds all the same."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from elasticd.config.tree import Config, parse
from elasticd.coordinator import election
from elasticd.coordinator.daemon import Coordinator
from elasticd.store.leader import ElectedLeader, campaign
from elasticd.store.memory import MemoryServer, MemoryStore
from tests.coordinator.agents import PLANNER, config, coordinating, lead, post, until


def read_anew(before: Config) -> Config:
    """The file with another policy, as after SIGHUP."""
    return msgspec.structs.replace(before, policy=parse("[policy]\nminimum_saving = 0.5\n", "t").policy)


def test_file_that_is_read_anew_while_it_stands_by_holds_once_it_leads() -> None:
    async def body() -> None:
        server, waits = MemoryServer(), list[ElectedLeader]()
        second = Coordinator(config(), MemoryStore(server), planner=PLANNER, standing_by=waits.append)
        async with coordinating(server):
            starting = asyncio.create_task(lead(second))
            await until(lambda: bool(waits))
            second.reconfigure(read_anew(second.config))
        await asyncio.wait_for(starting, 60)
        try:
            assert second.leading.state.settings.policy.minimum_saving == 0.5
        finally:
            await second.stop()

    asyncio.run(body())


def test_file_that_is_read_anew_while_a_change_is_written_is_not_lost() -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            durable, once = coordinator.commands._durable, [True]

            async def late(mark: int, otherwise: str) -> None:
                await durable(mark, otherwise)
                if once:
                    once.clear()
                    coordinator.reconfigure(read_anew(coordinator.config))

            coordinator.commands._durable = late  # type: ignore[method-assign]
            status, _ = await post(coordinator, "/v1/config", {"values": {"policy.paused": True}, "by": "me"})
            assert status == 200
            policy = coordinator.leading.state.settings.policy
            assert (policy.paused, policy.minimum_saving) == (True, 0.5)

    asyncio.run(body())


def test_keeper_of_the_lease_lives_though_the_loop_answers_in_the_midst_of_its_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        store = MemoryStore(MemoryServer())
        leadership = await asyncio.to_thread(campaign, store, "/k", "c", "u", 1)
        stand, answered, looks = threading.Event(), threading.Event(), list[float]()
        here, monotonic = threading.current_thread(), time.monotonic

        def looked() -> float:
            if threading.current_thread() is not here:
                looks.append(monotonic())
                if len(looks) == 2:  # it asked before, and has no answer yet; it comes now
                    stand.set()
                    answered.wait(60)
            return monotonic()

        monkeypatch.setattr(election, "time", SimpleNamespace(monotonic=looked))
        term = SimpleNamespace(leadership=leadership)
        keeper = election.keep(store, term, print, None)  # type: ignore[arg-type]
        try:
            stand.wait(60)  # the loop stands still over two looks
            asyncio.get_running_loop().call_soon(answered.set)
            await until(lambda: len(looks) > 2, 60)
            thread = keeper._thread
            assert thread is not None
            assert thread.is_alive()
        finally:
            answered.set()
            keeper.stop()

    asyncio.run(body())
