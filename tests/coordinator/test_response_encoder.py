"""What viewers ask for is made and encoded beside the event loop, and is what it would be in one piece."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast, get_origin
from unittest.mock import patch

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.coordinator import daemon
from elasticd.coordinator.http import response_encoder
from elasticd.coordinator.http.api import ApiRoutes, Served
from elasticd.coordinator.http.routing import endpoints
from elasticd.machines.job.state.job_state import JobPhase, fresh
from elasticd.wire.api_types import ClusterStatus, Events, LeaderStatus, NodeStatus, Steps
from elasticd.wire.event_record import EventRecord, Pacing
from elasticd.wire.step_record import StepRecord
from tests.coordinator.agents import coordinating


class Loop:
    """Asks, in the middle of work, whether the event loop runs something else before the work goes on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.free: dict[str, bool] = {}

    def ask(self, name: str) -> None:
        ran = threading.Event()
        self._loop.call_soon_threadsafe(ran.set)
        self.free[name] = ran.wait(5.0)

    def asked(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*values: Any) -> Any:
            self.ask(name)
            return work(*values)

        return waiting

    def asked_first(self, name: str, work: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        def waiting(*values: Any) -> Iterator[bytes]:
            self.ask(name)
            yield from work(*values)

        return waiting


@pytest.mark.parametrize(
    ("path", "work"),
    [
        ("/v1/status", {"made", "encoded"}),
        ("/v1/events", {"encoded"}),
        ("/v1/jobs/j/steps", {"encoded"}),
        ("/v1/jobs/j/history", {"encoded"}),
        ("/metrics", {"shown"}),
    ],
)
def test_a_viewers_request_leaves_the_loop_free(path: str, work: set[str]) -> None:
    async def body() -> None:
        async with coordinating() as coordinator:
            leading = coordinator.leading
            leading.runner.state = msgspec.structs.replace(
                leading.state, jobs={"j": fresh("j", JobPhase.RUNNING, 0.0)}
            )
            loop = Loop()
            with (
                patch.object(daemon, "status", loop.asked("made", daemon.status)),
                patch.object(response_encoder, "pieces", loop.asked_first("encoded", response_encoder.pieces)),
                patch.object(leading.metrics, "text", loop.asked("shown", leading.metrics.text)),
                httpx2.Client(base_url=coordinator.url, trust_env=False) as client,
            ):
                answer = await asyncio.to_thread(client.get, path)
            assert answer.status_code == 200
            assert loop.free == dict.fromkeys(work, True)

    asyncio.run(body())


def test_many_viewers_share_one_thread_and_the_end_waits_for_it() -> None:
    async def body() -> None:
        beside, threads = response_encoder.Viewers(), set[str]()
        await asyncio.gather(
            *(beside.beside(lambda: threads.add(threading.current_thread().name)) for _ in range(20))
        )
        assert len(threads) == 1
        working, done = threading.Event(), []

        def work() -> None:
            working.set()
            time.sleep(0.05)
            done.append(True)

        last = asyncio.ensure_future(beside.beside(work))
        await asyncio.to_thread(working.wait, 60.0)
        await beside.close()
        assert done
        await last

    asyncio.run(body())


event = st.builds(
    EventRecord,
    id=st.integers(0, 9),
    time=st.floats(0, 9),
    kind=st.text(),
    job=st.text(),
    text=st.text(),
    data=st.dictionaries(st.text(), st.integers(0, 9)),
)
step = st.builds(
    StepRecord,
    step=st.integers(0, 9),
    plan=st.just(1),
    loss=st.none() | st.floats(0, 9),
    tokens=st.none(),
    seconds=st.just(0.1),
    time=st.just(1.0),
)
node = st.builds(
    NodeStatus,
    node=st.text(),
    connected=st.booleans(),
    address=st.text(),
    emulated=st.booleans(),
    devices=st.just(()),
)
ANSWERS = st.one_of(
    st.builds(Events, events=st.lists(event).map(tuple)),
    st.builds(Steps, steps=st.lists(step).map(tuple), pacing=st.builds(Pacing, paced=st.integers(0, 9))),
    st.builds(
        ClusterStatus,
        cluster=st.text(),
        leader=st.just(LeaderStatus(name="c", url="u", epoch=1)),
        nodes=st.lists(node).map(tuple),
        jobs=st.just(()),
    ),
)


@given(ANSWERS, st.integers(1, 200))
def test_pieces_together_are_the_answer_in_one(answer: msgspec.Struct, size: int) -> None:
    made = list(response_encoder.pieces(answer, size))
    assert b"".join(made) == msgspec.json.encode(answer)
    assert all(made), "a piece without a byte would end the answer"


def test_a_large_answer_is_sent_in_pieces_that_are_not_much_larger_than_one_item() -> None:
    told = EventRecord(id=1, time=1.0, kind="raised", job="j", text="x" * 8000, data={})
    made = list(response_encoder.pieces(Events(events=(told,) * 100), 64 << 10))
    assert len(made) >= 12
    assert max(map(len, made)) < (64 << 10) + 8200


def test_every_field_of_a_large_answer_that_grows_is_a_list() -> None:
    """What is no list is encoded at once: it must not be what grows with the cluster."""
    large = [known for known in endpoints(ApiRoutes(cast(Served, None))) if known.large]
    others = {
        field.name
        for known in large
        for field in msgspec.structs.fields(known.answer)
        if get_origin(field.type) is not tuple
    }
    assert {known.name for known in large} == {"status", "events", "steps", "history"}
    assert others == {"cluster", "leader", "paused", "pacing", "unwritten_seconds"}
