"""The dashboard's history: each event once, rolled-back steps gone, its size bounded, broken files aside."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.codec import decoding
from elasticd.config.tree import ConfigError
from elasticd.coordinator.events.job_times import JobClock
from elasticd.dashboard.board import Board
from elasticd.dashboard.event_page import grouped
from elasticd.dashboard.history import MOST_PLANS, EventQuery, HistoryReader, HistoryWriter, Sample, opened
from elasticd.dashboard.report import _devices
from elasticd.dashboard.stream import Streams
from elasticd.demo.scenario import DemoScenario
from elasticd.wire.api_types import NodeStatus
from elasticd.wire.event_record import EventRecord
from elasticd.wire.live_types import RankNews
from elasticd.wire.node_health import Health
from elasticd.wire.step_record import StepRecord
from tests.demo.records import history as demo_history


def event(id_: int, kind: str = "chaos", *, at: float = 0.0, job: str = "", **data: object) -> EventRecord:
    return EventRecord(id=id_, time=at or float(id_), kind=kind, job=job, text=f"event {id_}", data=dict(data))


def step(index: int, at: float, *, plan: int = 1, seconds: float = 1.0) -> StepRecord:
    return StepRecord(step=index, plan=plan, loss=1.0, tokens=10, seconds=seconds, time=at)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[HistoryWriter]:
    found = opened(tmp_path / "history.db")
    yield found
    found.close()


@pytest.fixture
def reader(writer: HistoryWriter) -> Iterator[HistoryReader]:
    found = HistoryReader(writer.path)
    yield found
    found.close()


def test_rows_that_cannot_be_read_are_skipped_and_said_once(
    writer: HistoryWriter,
    reader: HistoryReader,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newer release wrote them, or the disk has damaged them."""
    monkeypatch.setattr(decoding, "_logged", set())
    for number in (1, 2, 3, 4):
        writer.put_event(event(number))
    other = {1: b'["t",{},"newer"]', 2: b'["\xff",{}]', 3: b'["t",' + b"[" * 3000 + b"]" * 3000 + b"]"}
    for number, body in other.items():
        writer._db.execute("UPDATE events SET body = ? WHERE id = ?", (body, number))
    for _ in range(2):
        assert [found.id for found in reader.events(EventQuery())] == [4]
    assert sum("a row of the dashboard's history is no" in one.getMessage() for one in caplog.records) == 1


def test_an_event_that_comes_twice_is_kept_once(writer: HistoryWriter, reader: HistoryReader) -> None:
    assert writer.put_event(event(1))
    assert not writer.put_event(event(1))
    assert writer.put_event(event(2, node="alpha", device="alpha/1"))
    assert [found.id for found in reader.events(EventQuery())] == [2, 1]
    assert [found.id for found in reader.events(EventQuery(device="alpha/1"))] == [2]
    assert writer.newest_event() == 2


def test_steps_that_are_made_again_take_the_place_of_the_earlier(
    writer: HistoryWriter, reader: HistoryReader
) -> None:
    for index in range(10):
        assert writer.put_step("j", step(index, 100.0 + index))
    for index in range(6, 8):  # rolled back to step 6
        assert writer.put_step("j", step(index, 200.0 + index, plan=2))
    assert not writer.put_step("j", step(7, 207.0, plan=2)), "fetched again"
    assert not writer.put_step("j", step(5, 105.0)), "fetched again"
    rows, every = reader.steps("j")
    assert every == 1
    assert [(row.step, row.plan) for row in rows] == [*((i, 1) for i in range(6)), (6, 2), (7, 2)]
    assert reader.seconds_by_plan("j") == {1: (6, 1.0), 2: (2, 1.0)}


def test_many_steps_are_thinned_to_what_a_chart_shows(writer: HistoryWriter, reader: HistoryReader) -> None:
    with writer.together():
        for index in range(1000):
            writer.put_step("j", step(index, float(index)))
    rows, every = reader.steps("j", most=100)
    assert every == 10
    assert [row.step for row in rows] == list(range(0, 1000, 10))
    rows, every = reader.steps("j", since=990)
    assert [row.step for row in rows] == list(range(991, 1000))


def test_old_rows_go_and_a_file_that_is_too_large_loses_measurements_before_events(
    writer: HistoryWriter, reader: HistoryReader
) -> None:
    with writer.together():
        for number in range(1, 3001):
            writer.put_event(event(number, at=1000.0 + number, job="j"))
        writer.put_samples(Sample(f"n/{i % 8}", 1000.0 + i, i, 1.5, 1.0, None) for i in range(20_000))
        for number in range(200):
            writer.put_health("n", 1000.0 + number, Health(stolen=0.5))
    before = writer.size
    writer.bound(oldest=1500.0, most_bytes=1 << 30)
    assert len(reader.events(EventQuery(limit=10_000))) == 2501
    writer.bound(oldest=0.0, most_bytes=before * 2 // 5)
    assert writer.size < before / 2
    assert len(reader.events(EventQuery(limit=10_000))) == 2501, "measurements go first"


def test_a_file_that_is_no_history_is_put_aside_and_one_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(b"no database, but a text that is long enough to be taken for one" * 100)
    writer = opened(path)
    writer.put_event(event(1))
    assert len(list(tmp_path.glob("history.db.2*"))) == 1
    with pytest.raises(ConfigError, match="another dashboard keeps its history"):
        opened(path)
    writer.close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
    opened(path).close()
    with pytest.raises(ConfigError, match="set history in section"):
        opened(tmp_path / "history.db" / "below")


def test_a_file_of_the_release_before_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    writer = opened(path)
    writer.put_step("j", step(0, 100.0))
    writer.close()
    with sqlite3.connect(path) as other:
        for column in ("ended_at", "clock"):
            other.execute(f"ALTER TABLE steps DROP COLUMN {column}")
        other.execute("PRAGMA user_version = 2")
    writer = opened(path)
    writer.put_step("j", msgspec.structs.replace(step(1, 101.0), ended_at=7.0, clock="first"))
    rows = HistoryReader(str(path)).newest_steps("j", 2)
    assert [(row.step, row.ended_at, row.clock) for row in rows] == [(0, 0.0, ""), (1, 7.0, "first")]
    writer.close()
    assert [file.name for file in tmp_path.glob("history.db.2*")] == [], "nothing is put aside"


def test_a_name_that_is_used_again_after_its_job_was_forgotten_begins_another_run(
    writer: HistoryWriter, reader: HistoryReader
) -> None:
    writer.put_event(event(1, "job_gathered", job="j"))
    for index in range(5):
        writer.put_step("j", step(index, 100.0 + index, plan=4))
    writer.put_rank("j", 4, RankNews(device="a/0", at=1.0, what="prepared"))
    writer.put_event(event(7, "forgotten", job="j"))
    assert reader.newest_step("j") is not None, "it is shown until another one begins"
    assert writer.newest_step("j") == writer.newest_plan("j") == -1
    writer.put_event(event(8, "job_gathered", job="j"))
    assert writer.put_step("j", step(0, 90.0))
    assert [row.step for row in reader.steps("j")[0]] == [0]
    assert reader.newest_switch("j") == 0
    assert reader.after("j") == 7
    rows = sqlite3.connect(writer.path).execute("SELECT count(*) FROM steps").fetchone()
    assert rows == (6,), "the steps of the first run stay"
    writer.put_event(event(9, "forgotten", job="other"))
    assert writer.going_on() == {"j"}


def test_a_leader_whose_clock_is_behind_takes_no_step_for_an_old_one(
    writer: HistoryWriter, reader: HistoryReader
) -> None:
    for index in range(100):
        writer.put_step("j", step(index, 1000.0 + index))
    taken = [writer.put_step("j", step(index, 990.0 + index, plan=2)) for index in range(50, 110)]
    assert all(taken)
    assert not writer.put_step("j", step(100, 1100.0)), "rolled back, and told late"
    rows, _ = reader.steps("j")
    assert [(row.step, row.plan) for row in rows] == [(i, 1 if i < 50 else 2) for i in range(110)]


def test_the_history_is_put_aside_as_a_whole(writer: HistoryWriter, reader: HistoryReader) -> None:
    writer.put_event(event(1))
    writer.put_step("j", step(0, 1.0))
    writer.put_aside()
    assert reader.events(EventQuery()) == []
    assert reader.newest_step("j") is None
    (aside,) = Path(writer.path).parent.glob("history.db.2*")
    assert aside.stat().st_mode & 0o77 == 0
    assert sqlite3.connect(aside).execute("SELECT id FROM events").fetchall() == [(1,)]


def test_each_table_keeps_its_share_where_the_file_is_too_large(
    writer: HistoryWriter, reader: HistoryReader
) -> None:
    with writer.together():
        for number in range(1, 3001):
            writer.put_event(event(number, job="j"))
            writer.put_step("j", step(number, float(number)))
        run, body = writer.run("j"), os.urandom(20_000)
        writer._db.executemany(
            "INSERT INTO plans VALUES (?, ?, ?, ?, ?)", ((run, n, n * 5.0, b"{}", body) for n in range(1, 601))
        )
    pieces = list(writer.bounding(oldest=0.0, most_bytes=2 << 20))
    assert len(pieces) > 20, "in small pieces"
    assert writer.size <= 2 << 20
    assert writer._free() == 0, "the file is as small"
    assert len(reader.events(EventQuery(limit=10_000))) == 3000
    assert len(reader.steps("j")[0]) == 3000
    numbers = reader.numbers("j")
    assert 10 < len(numbers) < 40
    assert numbers[-1] == 600


def test_plans_are_bounded_by_number_and_age_and_the_newest_of_a_job_stays(
    writer: HistoryWriter, reader: HistoryReader
) -> None:
    run = writer.run("j")
    writer._db.executemany(
        "INSERT INTO plans VALUES (?, ?, ?, ?, ?)", ((run, n, float(n), b"{}", b"") for n in range(1, 1001))
    )
    writer.bound(oldest=0.0, most_bytes=1 << 30)
    assert reader.numbers("j") == tuple(range(1001 - MOST_PLANS, 1001))
    writer.bound(oldest=5000.0, most_bytes=1 << 30)
    assert reader.numbers("j") == (1000,)
    writer.end_run("j")
    writer.bound(oldest=5000.0, most_bytes=1 << 30)
    assert reader.numbers("j") == ()


def test_the_list_of_plans_does_not_cost_plans_times_steps(
    writer: HistoryWriter, reader: HistoryReader
) -> None:
    with writer.together():
        run = writer.run("j")
        writer._db.executemany(
            "INSERT INTO steps VALUES (?, ?, ?, ?, ?, 1, 1.0, NULL, NULL, 0.0, '')",
            ((run, i, i // 400, float(i), float(i % 400 + 1)) for i in range(40_000)),
        )
    looked = 0

    def count() -> None:
        nonlocal looked
        looked += 1000

    reader._db.set_progress_handler(count, 1000)
    assert reader.seconds_by_plan("j")[7] == (400, 201.0)
    assert looked < 20 * 40_000, "instructions"
    looked = 0
    assert len(reader.steps_of_plan("j", 99)) == 400
    assert looked < 20 * 40_000


def test_what_ranks_said_is_kept_by_switch(writer: HistoryWriter, reader: HistoryReader) -> None:
    for number in (3, 4):
        for what, at in (("prepared", 1.0), ("swapped", 2.0)):
            writer.put_rank("j", number, RankNews(device="a/0", at=at + number, what=what, pause=0.5))
    assert reader.newest_switch("j") == 4
    assert [rank.what for rank in reader.ranks("j", 3)] == ["prepared", "swapped"]
    assert reader.newest_switch("other") == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0.01, 5.0), st.floats(0.0, 3.0)), max_size=60))
def test_every_second_of_a_jobs_wall_time_is_productive_or_lost(steps: list[tuple[int, float, float]]) -> None:
    clock, now = JobClock(), 1000.0
    for index, seconds, gap in steps:
        now += seconds + gap
        clock.step(step(index, now, seconds=seconds))
    found = clock.time
    if not steps:
        assert found is None
        return
    assert found is not None
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.wall(), abs=1e-6)
    assert found.repeated + found.steps == len(steps)
    ettr, goodput = found.ettr(), found.goodput()
    assert ettr is not None
    assert 0 <= ettr <= 1
    assert goodput is None or goodput <= ettr + 1e-9


def test_a_loss_has_the_cause_that_was_told_before_the_next_step() -> None:
    clock = JobClock()
    clock.step(step(0, 1.0))
    clock.event("worker_lost", {}, 0.0)
    clock.event("recorded", {}, 0.0)
    clock.step(step(1, 12.0))
    clock.event("recorded", {}, 0.0)
    clock.step(step(2, 15.0))
    clock.step(step(3, 16.5))
    found = clock.time
    assert found is not None
    assert found.lost == {"recovery": 10.0, "switch": 2.0, "between steps": 0.5}


def test_groups_lead_from_the_cause_to_the_plan_and_take_each_event_once() -> None:
    told = [
        event(1, "slow", job="j", device="a/1"),
        event(2, "planning", job="j"),
        event(3, "proposed", job="j", number=5),
        event(4, "slow", job="other", device="b/0"),
        event(5, "recorded", job="j", number=5),
        event(6, "fenced", job="j"),
        event(7, "proposed", job="j", number=6),
        event(8, "aborted", job="j", number=6),
        event(9, "gained", job="j", number=5),
    ]
    groups = grouped(told)
    assert [group.plan for group in groups] == [6, 5]
    assert [each.id for each in groups[1].events] == [1, 2, 3, 5, 9]
    assert [each.id for each in groups[0].events] == [6, 7, 8]
    assert "given up" in groups[0].title
    assert groups[1].durations["recorded"] == 2.0


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        (("shifted", "slow"), "event 2"),
        (("slow", "shifted"), "event 1"),
        (("planning", "shifted"), "event 2"),
        (("shifted", "planning"), "event 1"),
        (("worker_lost", "fenced"), "event 1"),
        (("planning",), "event 1"),
    ],
)
def test_a_group_is_named_by_what_happened_before_what_is_measured_at_any_time(
    kinds: tuple[str, ...], named: str
) -> None:
    told = [event(at + 1, kind, job="j") for at, kind in enumerate(kinds)]
    (group,) = grouped([*told, event(9, "proposed", job="j", number=5)])
    assert group.title == f"plan 5: {named}"


def test_a_devices_page_decodes_the_plans_alone_that_count_with_another_slowdown_of_it(
    writer: HistoryWriter, reader: HistoryReader
) -> None:
    records = demo_history()
    for record in records:
        writer.put_plan("j", record, 1.0)
    slow = DemoScenario().slow_device
    assert [(r.number, rate) for r, rate in reader.counted("j", slow, 16)] == [(1, 1.0), (2, 3.0), (3, 1.0)]
    other = HistoryReader(writer.path)
    assert [record.number for record, _ in other.counted("j", "beta/1", 16)] == [1]
    assert len(other._plans) == 1, "the others are not decoded"
    found, again = other.plan("j", 1), other.plan("j", 1)
    assert found is not None
    assert again is not None
    assert found[0] is again[0] == records[0]
    other.close()


def test_a_report_has_the_devices_of_its_job_alone() -> None:
    board = Board(Streams(0))
    plan = demo_history()[0].plan
    board.known.cluster.plans["j"] = plan
    for name in ("alpha", "beta", *(f"other{i}" for i in range(100))):
        board.known.cluster.nodes[name] = NodeStatus(
            node=name, connected=True, address="", emulated=True, devices=()
        )
    assert _devices(board, "j") == sorted(plan.members)
    assert _devices(board, "other") == []
