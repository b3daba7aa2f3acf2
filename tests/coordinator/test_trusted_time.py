"""A leader whose clock is wrong deletes nothing, and cuts no wish to stop a job short."""

from __future__ import annotations

import time

import pytest

from elasticd.coordinator.events.event_log import EventRecord, Lines
from elasticd.coordinator.events.switch_gain import StepRecord
from elasticd.coordinator.events.trusted_time import JUMP, newest_of
from elasticd.coordinator.store_writer import stored
from elasticd.machines.coordinator import machine
from elasticd.machines.job.state.events import CoordinatorTick
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.records import DoneRecord, Keys, StopRecord, encode
from elasticd.store.protocol import KeyValue

KEYS = Keys(cluster="c")
DAY = 86_400.0


def item(part: str, record: DoneRecord | StopRecord) -> KeyValue:
    key = KEYS.job("j", part)
    return KeyValue(key=key, value=encode(record), create_revision=1, mod_revision=1, version=1)


def taken_over(
    monkeypatch: pytest.MonkeyPatch, *, ended: float, newest: float, clock: float
) -> tuple[bool, float]:
    """Whether a leader with this clock keeps a job after its first look, and the age that it sees (seconds)."""
    monkeypatch.setattr(time, "time", lambda: clock)
    (found,) = stored(KEYS, [item("done", DoneRecord(step=3, epoch=1, reason="x", at=ended))], newest)
    state = machine.takeover(2, [found], JobSettings(), 1000.0)
    state, _ = machine.step(state, CoordinatorTick(), 1000.1)
    return "j" in state.jobs, found.over_seconds


@pytest.mark.parametrize("ahead", [0.0, 2 * DAY, 8 * DAY, 3650 * DAY])
def test_a_job_that_just_ended_is_kept_however_far_the_clock_is_ahead(
    monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    now = 1e9
    kept, age = taken_over(monkeypatch, ended=now - 60, newest=now - 1, clock=now + ahead)
    assert kept
    assert 60 <= age <= 60 + JUMP


def test_age_counts_over_leaders_by_what_they_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    assert not taken_over(monkeypatch, ended=now - 8 * DAY, newest=now - 5, clock=now)[0]
    kept, age = taken_over(monkeypatch, ended=now - 3 * DAY, newest=now - 5, clock=now)
    assert (kept, age) == (True, 3 * DAY)
    assert taken_over(monkeypatch, ended=now, newest=now, clock=now - 9 * DAY) == (True, 0.0), "behind"
    kept, age = taken_over(monkeypatch, ended=now - 8 * DAY, newest=0.0, clock=now)
    assert (kept, age) == (True, JUMP), "no journal: its own end is all that was written"


@pytest.mark.parametrize(
    ("ahead", "newest", "age"), [(0.0, 30.0, 30.0), (8 * DAY, 30.0, 30.0), (8 * DAY, 0.0, 0.0)]
)
def test_wish_to_stop_has_the_time_that_was_given_however_far_the_clock_is_ahead(
    monkeypatch: pytest.MonkeyPatch, ahead: float, newest: float, age: float
) -> None:
    asked = 1e9
    monkeypatch.setattr(time, "time", lambda: asked + 30.0 + ahead)
    stop = item("stop", StopRecord(by="alice", seconds=600.0, at=asked))
    (found,) = stored(KEYS, [stop], asked + newest if newest else 0.0)
    assert found.stop_seconds == age


def test_newest_time_of_the_journal_is_that_of_any_event_or_step() -> None:
    event = EventRecord(id=1, kind="node_up", job="", text="", data={}, time=5.0)
    step = StepRecord(step=0, plan=1, loss=None, tokens=None, seconds=1.0, time=9.0)
    assert newest_of([]) == newest_of([Lines()]) == 0.0
    assert newest_of([Lines(events=(event,)), Lines(steps={"j": (step,)}), Lines(events=(event,))]) == 9.0
