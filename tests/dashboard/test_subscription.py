"""What the subscription writes and tells: runs of a job, another etcd, and a disk that is full for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from elasticd_planner.detection.settings import DetectSettings

from elasticd.config.tree import DashboardSection
from elasticd.dashboard.history import EventQuery, HistoryReader, opened
from elasticd.dashboard.subscription import Subscription, Told
from elasticd.wire import live_types as live
from elasticd.wire.api_types import JobStatus, LeaderStatus, Steps
from elasticd.wire.event_record import EventRecord, Pacing
from elasticd.wire.step_record import StepRecord
from tests.cli.test_status import PLAN

HELLO = live.LiveHello(
    id="1:1",
    cluster="test",
    leader=LeaderStatus(name="c", url="http://c", epoch=1),
    release="1",
    at=1.0,
    chaos=False,
    newest_event=0,
    detect=DetectSettings(),
    store="a",
)
PULSE = live.LeaderPulse(id="1:2", at=1.0, store_away=False, paused=False)


class Leader:
    """What a leader answers, and what the subscription to it wrote and told. Its messages are handed over one
    by one."""

    def __init__(self, path: Path) -> None:
        self.happened: list[EventRecord] = []
        self.made: dict[str, list[StepRecord]] = {}
        self.told: list[Told] = []
        self.writer = opened(path)
        self.reader = HistoryReader(str(path))
        self.subscription = Subscription(self._connect, self.writer, DashboardSection(), self.told.append)
        self.subscription._bound_at = float("inf")

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        yield self

    def events(self, after: int = 0) -> tuple[EventRecord, ...]:
        return tuple(event for event in self.happened if event.id > after)

    def steps(self, job: str, after: int = -1) -> Steps:
        return Steps(steps=tuple(step for step in self.made[job] if step.step > after), pacing=Pacing())

    def history(self, job: str, after: int = -1) -> tuple[()]:
        return ()

    def say(self, *news: live.AnyNews) -> None:
        for each in news:
            self.subscription._on_news(self, each)  # type: ignore[arg-type]

    def hello(self, *jobs: live.PutValue, **changes: Any) -> None:
        self.say(msgspec.structs.replace(HELLO, **changes), *jobs, live.Whole(id="1:1"))

    def event(self, number: int, kind: str = "chaos", job: str = "") -> None:
        event = EventRecord(id=number, time=float(number), kind=kind, job=job, text="", data={})
        self.happened.append(event)
        self.say(live.append("1:3", "event", event.job, event))

    def step(self, job: str, index: int, at: float, plan: int = 1) -> None:
        step = StepRecord(step=index, plan=plan, loss=1.0, tokens=1, seconds=1.0, time=at)
        self.made.setdefault(job, []).append(step)
        self.say(live.append("1:3", "step", job, step))

    @property
    def written(self) -> list[int]:
        return [event.id for event in self.reader.events(EventQuery(limit=1000))][::-1]

    @property
    def shown(self) -> list[int]:
        return [news.value.id for news in map(attrgetter("news"), self.told) if kind_of(news) == "event"]


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    found = Leader(tmp_path / "history.db")
    yield found
    found.subscription._stopped.set()
    found.subscription._fetches.shutdown(cancel_futures=True)
    found.reader.close()
    found.writer.close()


def kind_of(news: live.AnyNews | None) -> str:
    return news.kind if isinstance(news, live.Valued) else ""


def job(name: str, plan: int = 1, step: int = 0, *, over: bool = False) -> live.PutValue:
    status = JobStatus(
        job=name,
        phase="trains",
        reason="",
        plan=None,
        proposal=None,
        step=step,
        loss=None,
        tokens_per_second=None,
        members=(),
    )
    return live.put("1:1", "job", status.job, live.LiveJob(job=status, plan=plan, over=over))


def gone(leader: Leader) -> None:
    leader.say(live.Drop(id="1:3", kind="job", key="j"))
    leader.event(9, "forgotten", "j")


def forgotten_while_away(leader: Leader) -> None:
    leader.hello()


def numbers_that_fell(leader: Leader) -> None:
    leader.subscription._plans.clear()  # as after a connection that broke


@pytest.mark.parametrize("ended", [gone, forgotten_while_away, numbers_that_fell])
def test_a_job_of_a_forgotten_ones_name_is_another_run(leader: Leader, ended: Callable[[Leader], None]) -> None:
    leader.made["j"] = []
    leader.hello(job("j", plan=5))
    for index in range(20):
        leader.step("j", index, 100.0 + index, plan=5)
    ended(leader)
    assert leader.reader.newest_step("j").step == 19, "it is shown until another one begins"  # type: ignore[union-attr]
    leader.made["j"] = []
    leader.say(job("j", plan=1))
    leader.step("j", 0, 130.0)
    assert [row.step for row in leader.reader.steps("j")[0]] == [0]
    (kept,) = leader.writer._db.execute("SELECT count(*) FROM steps").fetchone()
    assert kept == 21, "the first run's steps are there"


def test_a_new_etcd_has_its_events_shown_and_the_old_ones_put_aside(leader: Leader, tmp_path: Path) -> None:
    leader.hello()
    for number in range(1, 6):
        leader.event(number)
    leader.happened = []
    leader.hello(store="b")
    leader.event(1)
    leader.event(2)
    assert leader.written == [1, 2]
    assert leader.shown == [1, 2, 3, 4, 5, 1, 2]
    assert len(list(tmp_path.glob("history.db.2*"))) == 1
    leader.hello(store="b")
    assert leader.written == [1, 2]


def test_a_new_etcd_while_the_disk_is_full_is_told_from_the_old_one_once_there_is_space(leader: Leader) -> None:
    leader.hello()
    for number in range(1, 6):
        leader.event(number)
    leader.happened = []
    leader.writer._db.execute("PRAGMA query_only = ON")
    leader.hello(store="b")
    leader.event(1)
    leader.event(2)
    assert leader.shown == [1, 2, 3, 4, 5, 1, 2]
    assert leader.written == [1, 2, 3, 4, 5]
    leader.writer._db.execute("PRAGMA query_only = OFF")
    leader.subscription._try_at = 0.0
    leader.say(PULSE)
    assert leader.written == [1, 2]
    assert leader.shown == [1, 2, 3, 4, 5, 1, 2]


def test_a_full_disk_stops_no_page_and_what_the_leader_has_is_written_once_there_is_space(
    leader: Leader,
) -> None:
    leader.made["j"] = []
    leader.hello(job("j"))
    leader.event(1)
    db = leader.writer._db
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    for number in range(2, 2000):
        leader.event(number)
    assert leader.written[-1] < 1999, "the disk is full"
    leader.happened = leader.happened[:1000]
    leader.hello(job("j"))  # as after a change of the leader
    leader.step("j", 0, 1.0)
    leader.say(PULSE)
    assert leader.shown == [*range(1, 2000)]
    assert leader.written == [*range(1, len(leader.written) + 1)], "there is no gap"
    db.execute("PRAGMA max_page_count = 1000000")
    leader.subscription._try_at = 0.0
    leader.say(PULSE)
    assert leader.written == [*range(1, 1001)], "all that the leader has"
    assert len(leader.reader.steps("j")[0]) == 1
    leader.event(2001)
    assert leader.written[-1] == 2001
    assert leader.shown == [*range(1, 2000), 2001]


def test_the_history_is_bounded_beside_the_feed(leader: Leader) -> None:
    leader.subscription._section = DashboardSection(keep_days=1)
    leader.subscription._bound_at = 0.0
    leader.hello(at=time.time())
    leader.event(1)
    leader.say(msgspec.structs.replace(PULSE, at=time.time()))
    leader.subscription._bounds.shutdown()
    assert leader.written == []


@pytest.mark.parametrize("ahead", [300 * 86_400.0, -300 * 86_400.0])
@pytest.mark.parametrize("whose", ["machine", "leader"])
def test_a_wrong_clock_deletes_nothing_of_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str, ahead: float
) -> None:
    """Two starts of the dashboard: what the first has bounded is not taken for the truth by the second."""
    now = time.time()
    writer = opened(tmp_path / "history.db")
    for number in (1, 2, 3):
        event = EventRecord(id=number, time=now - number, kind="chaos", job="", text="", data={})
        assert writer.put_event(event)
    writer.close()
    clock = SimpleNamespace(time=lambda: now + (ahead if whose == "machine" else 0.0), monotonic=time.monotonic)
    monkeypatch.setattr("elasticd.dashboard.subscription.time", clock)
    for _ in range(2):
        leader = Leader(tmp_path / "history.db")
        leader.subscription._bound_at = 0.0
        leader.hello(at=now + (ahead if whose == "leader" else 0.0))
        leader.subscription._bounds.shutdown()
        assert leader.written == [1, 2, 3]
        leader.subscription._fetches.shutdown()
        leader.reader.close()
        leader.writer.close()


# -- lines over time -------------------------------------------------------------------------------------------

MEMBERS = ("a/0", "a/1", "b/0")


def planned(leader: Leader, number: int = 1) -> None:
    leader.made.setdefault("j", [])
    binding = dict.fromkeys(MEMBERS, "i")
    plan = PLAN.replace(number=number, binding=binding)
    leader.say(job("j", plan=number), live.put("1:2", "plan", "j", plan))


def measured(leader: Leader, *slowdowns: float, number: int = 1, step: int = 3) -> None:
    """Of the first two devices; nothing is known of the third."""
    table = np.array([[slowdown, 0.5] for slowdown in (*slowdowns, np.nan)], dtype="<f4")
    leader.say(
        live.append(
            "1:3",
            "measured",
            "j",
            live.MeasuredStep(plan=number, step=step, numbers=table.tobytes(), columns=live.JUDGED, lengths={}),
        )
    )


def line(leader: Leader, device: str) -> list[tuple[float | None, float | None]]:
    """What is measured and what is decided."""
    return [
        (round(found.measured, 2) if found.measured is not None else None, found.decided)
        for found in leader.reader.samples(device)
    ]


class Passing:
    """Time that passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("elasticd.dashboard.subscription.time.time", lambda: self.now)

    def __call__(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("how", ["over", "gone", "silent"])
def test_a_line_ends_where_nothing_is_measured_any_more_and_begins_anew(
    leader: Leader, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a device that was normal all the time, of which nothing changed."""
    passing = Passing(monkeypatch)
    leader.hello()
    planned(leader)
    measured(leader, 1.0, 2.0)
    passing(1.0)
    measured(leader, 1.01, 2.01)
    passing(1.0)
    leader.say(live.append("1:4", "slowdowns", "", live.Slowdowns(rates={"a/1": 2.0}, slowness={})))
    passing(1.0)
    if how == "over":
        leader.say(job("j", over=True))
        measured(leader, 3.0, 3.0)  # of its last step: a leader tells it after the end
        passing(100.0)
        leader.say(job("j"))  # it was started again
    elif how == "gone":
        leader.say(live.Drop(id="1:4", kind="job", key="j"))
    passing(100.0)
    planned(leader)
    measured(leader, 1.0, 1.5)
    assert line(leader, "a/0") == [(1.0, 1.0), (1.01, 1.0), (None, None), (1.0, 1.0)]
    decided_at_once = [(2.0, 1.0), (2.01, 2.0), (None, None), (2.01, 2.0), (1.5, 2.0)]
    assert sorted(line(leader, "a/1"), key=str) == sorted(decided_at_once, key=str)
    times = [found.time for found in leader.reader.samples("a/0")]
    assert times == sorted(times)
    assert times[-1] - times[-2] > 100.0, "nothing is drawn across the gap"


def test_a_line_of_long_steps_does_not_break_between_two(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = Passing(monkeypatch)
    leader.hello()
    planned(leader)
    for slowdown in (2.0, 3.0, 4.0, 5.0):
        measured(leader, 1.0, slowdown)
        passing(14.0 if slowdown == 2.0 else 40.0)
    assert (None, None) not in line(leader, "a/1")
