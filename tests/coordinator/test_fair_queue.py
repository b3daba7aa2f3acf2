"""The line in which agents' words wait: in order, and the loop gets to do something else between slices."""

from __future__ import annotations

import asyncio

import pytest

from elasticd.coordinator.fair_queue import FairQueue


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_loop_runs_what_else_is_ready_after_each_slice() -> None:
    """A hundred connections speak at once; each takes a quarter of a slice."""

    async def main() -> list[str]:
        clock, seen = Clock(), list[str]()
        turns = FairQueue(seconds=1.0, clock=clock)

        async def handled() -> None:
            clock.now += 0.25
            seen.append("message")

        async def others() -> None:
            while seen.count("message") < 100:
                await asyncio.sleep(0)
                seen.append("other")

        beside = asyncio.create_task(others())
        await asyncio.gather(*(turns.take(handled) for _ in range(100)))
        beside.cancel()
        return seen

    seen = asyncio.run(main())
    longest = max(len(run) for run in "".join(word[0] for word in seen).split("o"))
    assert longest <= 4
    assert seen.count("message") == 100


def test_work_is_done_in_its_order_and_an_error_is_its_callers_alone() -> None:
    async def main() -> tuple[list[int], list[object]]:
        turns, seen = FairQueue(), list[int]()

        async def work(n: int) -> None:
            if n == 1:
                raise ValueError(n)
            seen.append(n)

        outcomes = await asyncio.gather(
            *(turns.take(lambda n=n: work(n)) for n in range(4)),  # type: ignore[misc]
            return_exceptions=True,
        )
        return seen, list(outcomes)

    seen, outcomes = asyncio.run(main())
    assert seen == [0, 2, 3]
    assert [type(each) for each in outcomes] == [type(None), ValueError, type(None), type(None)]


def test_work_of_who_was_cancelled_is_left_out_and_the_line_goes_on() -> None:
    async def main() -> list[str]:
        turns, seen, gate = FairQueue(), list[str](), asyncio.Event()

        async def first() -> None:
            await gate.wait()
            seen.append("first")

        async def say(word: str) -> None:
            seen.append(word)

        holding = asyncio.create_task(turns.take(first))
        gone = asyncio.create_task(turns.take(lambda: say("gone")))
        there = asyncio.create_task(turns.take(lambda: say("there")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(holding, there)
        with pytest.raises(asyncio.CancelledError):
            await gone
        await turns.take(lambda: say("later"))
        return seen

    assert asyncio.run(main()) == ["first", "there", "later"]
