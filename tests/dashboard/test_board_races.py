"""What the dashboard shows where something changes between two looks: of one moment, and never an error."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from elasticd.coordinator import live_feed
from elasticd.dashboard import app
from elasticd.dashboard.board import Board
from elasticd.dashboard.daemon import Dashboard
from elasticd.dashboard.history import HistoryReader, opened
from elasticd.dashboard.stream import Streams
from elasticd.dashboard.subscription import Told
from elasticd.machines.job.state.job_state import JobPhase, fresh
from elasticd.wire import live_types as live
from elasticd.wire.api_types import MemberStatus
from elasticd.wire.step_record import StepRecord
from tests.coordinator.agents import agent, coordinating, until
from tests.coordinator.test_live_feed import known_of, running_world
from tests.dashboard.serving import SOON, Page, serving, streaming
from tests.dashboard.test_report_forgotten import news_of
from tests.dashboard.test_views import HELLO, JOB, NOW, PLAN, VIEWER, job
from tests.machines.cast import node_record


def told(*news: Any) -> Board:
    board = Board(Streams(1))
    say(board, *news)
    return board


def say(board: Board, *news: Any) -> None:
    for each in news:
        board.hear(Told(at=NOW, news=each))


class SlowReads:
    """The dashboard's reads of its history, each of which waits until `go` is set."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.go, self.entered = asyncio.Event(), asyncio.Event()
        self._read = dashboard.read
        dashboard.read = self._wait  # type: ignore[method-assign]

    async def _wait(self, work: Callable[[HistoryReader], Any]) -> Any:
        self.entered.set()
        await self.go.wait()
        return await self._read(work)


def test_job_and_node_that_go_while_their_history_is_read_are_no_failure(tmp_path: Path) -> None:
    async def body() -> None:
        record = node_record("alpha")
        async with (
            coordinating() as coordinator,
            agent(coordinator, record),
            serving(coordinator, tmp_path) as dashboard,
            Page(dashboard.url) as page,
        ):
            await page.until("/api/cluster", lambda view: view["nodes"])
            dashboard.board.known.cluster.jobs["night"] = news_of("night", "running")
            for path, gone in (
                ("/api/jobs/night", live.Drop(id="1:3", kind="job", key="night")),
                ("/api/devices/alpha/1", live.Drop(id="1:4", kind="node", key="alpha")),
            ):
                reads = SlowReads(dashboard)
                asked = asyncio.create_task(page.get(path))
                await reads.entered.wait()
                dashboard.board.hear(Told(at=time.time(), news=gone))
                reads.go.set()
                answer = await asked
                assert answer.status_code == 404, answer.text

    asyncio.run(body())


def test_late_word_of_a_lost_leader_does_not_forget_the_next_one(tmp_path: Path) -> None:
    """The page's loop was busy while the connection broke and stood again."""

    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            await until(lambda: dashboard.leader == coordinator.url, SOON)
            tell, waiting = dashboard.subscription._tell, list[Told]()
            dashboard.subscription._tell = waiting.append
            server = coordinator._server
            assert server is not None
            assert server.door is not None
            for guest in [*server.door.guests]:
                server.door.drop(guest, "revoked")
            await until(lambda: any(isinstance(each.news, live.Whole) for each in waiting), SOON)
            dashboard.subscription._tell = tell
            for each in waiting:
                dashboard._on_news(each)
            assert dashboard.leader == coordinator.url

    asyncio.run(body())


def test_spec_of_a_job_that_was_forgotten_meanwhile_is_not_that_of_the_next_one(tmp_path: Path) -> None:
    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            await until(lambda: bool(dashboard.leader), SOON)
            begun, go = threading.Event(), threading.Event()

            def slow(job: str) -> Any:
                begun.set()
                go.wait(60)
                return "the first one's"

            dashboard._spec = slow  # type: ignore[method-assign]
            asked = asyncio.create_task(dashboard.spec("j"))
            await asyncio.to_thread(begun.wait, 60)
            dashboard._on_news(Told(at=time.time(), news=live.Drop(id="1:3", kind="job", key="j")))
            go.set()
            await asked
            dashboard._spec = lambda job: "the second one's"  # type: ignore[method-assign, assignment, return-value]
            assert await dashboard.spec("j") == "the second one's"

    asyncio.run(body())


def test_look_that_fails_costs_no_later_one(tmp_path: Path) -> None:
    async def body() -> None:
        async with coordinating() as coordinator, serving(coordinator, tmp_path) as dashboard:
            look, failed = dashboard.board.look, list[float]()

            def fails(now: float) -> None:
                if not failed:
                    failed.append(now)
                    raise IndexError("a fault that nobody knows")
                look(now)

            dashboard.board.look = fails  # type: ignore[method-assign]
            await until(lambda: bool(failed), SOON)
            with streaming(dashboard.url) as browser:
                await until(lambda: bool(browser.of("leader")), SOON)  # a pulse each second

    asyncio.run(body())


def test_what_an_earlier_job_of_the_name_measured_is_not_the_next_ones() -> None:
    """It was forgotten while nobody listened; its first plan had fewer members than the next one's."""
    board = told(
        HELLO,
        live.put("1:0", "job", JOB, live.LiveJob(job=job(), plan=3, over=False)),
        live.put("1:0", "plan", JOB, PLAN),
        live.Whole(id="1:0"),
    )
    rows = np.ones((len(PLAN.members) - 1, 2), "<f4")
    columns = ("block_seconds", "slowdown")
    measured = live.append(
        "1:1",
        "measured",
        JOB,
        live.MeasuredStep(plan=PLAN.number, step=3, numbers=rows.tobytes(), columns=columns, lengths={}),
    )
    say(board, measured, msgspec.structs.replace(HELLO, id="2:0"))
    say(
        board,
        live.put("2:0", "job", JOB, live.LiveJob(job=job(), plan=3, over=False)),
        live.put("2:0", "plan", JOB, PLAN),
        live.Whole(id="2:0"),
    )
    step = StepRecord(step=4, plan=PLAN.number, loss=1.0, tokens=1, seconds=1.0, time=NOW)
    say(board, live.append("2:1", "step", JOB, step))
    board.look(NOW + 1)
    assert JOB not in board.known.cluster.measured


def test_devices_of_a_job_without_a_plan_are_its_own_at_once_as_after_a_hello() -> None:
    board = told(
        HELLO, live.Whole(id="1:0"), live.put("1:1", "job", JOB, live.LiveJob(job=job(), plan=0, over=False))
    )
    member = MemberStatus(device="a/0", incarnation="i", pid=1)
    say(board, live.put("1:2", "members", JOB, (member,)))
    uses = dict(board.known.uses)
    assert uses["a/0"].job == JOB
    board.known._place()
    assert uses == board.known.uses


def test_job_that_is_started_again_is_shown_as_to_a_page_that_begins_then() -> None:
    """The leader forgets it and has another one of the name in one step: no word says that it was gone."""
    source, feed = known_of(running_world()), live_feed._Told()
    (name,) = source.state.jobs
    board = told(HELLO, *live_feed._changes(source, feed, lambda: "1:1"), live.Whole(id="1:1"))
    again = msgspec.structs.replace(fresh(name, JobPhase.GATHERING, 0.0), highest=1).changed("start", earlier=1)
    state = msgspec.structs.replace(source.state, jobs={name: again})
    source = msgspec.structs.replace(source, state=state)
    say(board, *live_feed._changes(source, feed, lambda: "1:2"))
    news = live_feed._changes(source, live_feed._Told(), lambda: "1:1")
    fresh_page = told(HELLO, *news, live.Whole(id="1:1"))

    def shown(page: Board) -> tuple[object, ...]:
        (row,) = page.hello(VIEWER).jobs
        return row.plan, row.devices, page.known.uses

    assert shown(board) == shown(fresh_page)


def test_what_is_read_together_is_of_one_moment(tmp_path: Path) -> None:
    """A recovery takes back the only step of a plan between two looks of a reader."""

    def step(index: int, plan: int, at: float) -> StepRecord:
        return StepRecord(step=index, plan=plan, loss=1.0, tokens=1, seconds=1.0, time=at)

    writer, reader = opened(tmp_path / "h.db"), HistoryReader(str(tmp_path / "h.db"))
    for record in (step(0, 1, 1.0), step(1, 2, 2.0)):
        writer.put_step("j", record)
    with reader.at_once():
        before = reader.seconds_by_plan("j")
        writer.put_step("j", step(1, 3, 3.0))
        assert reader.seconds_by_plan("j") == before
    assert {*reader.seconds_by_plan("j")} == {1, 3}


def test_plans_that_two_threads_ask_for_are_remembered_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(dict[Any, Any]):
        def __delitem__(self, key: Any) -> None:
            time.sleep(1e-4)
            super().__delitem__(key)

    answers: Any = app.DashboardRoutes.__new__(app.DashboardRoutes)
    answers._lock = threading.Lock()
    answers._plans = Slow({(number,): None for number in range(app.MOST_PLANS)})
    monkeypatch.setattr(app, "plan_view", lambda *args: "a view")
    history = SimpleNamespace(steps_of_plan=lambda job, number: [])
    errors = list[BaseException]()

    def ask(name: str) -> None:
        try:
            for number in range(200):
                record = SimpleNamespace(number=number)
                answers._plan_view(record, None, name, (), [], history, "j", None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
