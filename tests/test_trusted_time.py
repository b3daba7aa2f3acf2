"""A leader whose clock is wrong deletes nothing, and cuts no wish to stop a job short."""

from __future__ import annotations

import pytest

from elasticd.coordinator.events.event_log import Lines
from elasticd.coordinator.events.event_pages import newest_of, stamp_of
from elasticd.coordinator.store_writer import aged, read_times, stored
from elasticd.machines.coordinator import machine
from elasticd.machines.job.state.events import CoordinatorTick, Stored
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.records import DoneRecord, Keys, StopRecord, encode
from elasticd.store.protocol import KeyValue
from elasticd.trusted_time import JUMP_SECONDS, ReadTimes
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord

KEYS = Keys(cluster="c")
DAY = 86_400.0


def item(part: str, record: DoneRecord | StopRecord) -> KeyValue:
    key = KEYS.job("j", part)
    return KeyValue(key=key, value=encode(record), create_revision=1, mod_revision=1, version=1)


def read(record: KeyValue, newest: float, clock: float) -> Stored:
    """A job as a leader with this clock reads it; `newest` is the time of the journal's event (0: none)."""
    event = EventRecord(id=1, kind="node_up", job="", text="", data={}, time=newest)
    jobs = stored(KEYS, [record])
    (found,) = aged(jobs, read_times(jobs, [Lines(events=(event,))] if newest else [], clock))
    return found


def taken_over(*, ended: float, newest: float, clock: float) -> tuple[bool, float]:
    """Whether a leader with this clock keeps a job after its first look, and the age that it sees (seconds)."""
    found = read(item("done", DoneRecord(step=3, epoch=1, reason="x", at=ended)), newest, clock)
    state = machine.takeover(2, [found], JobSettings(), 1000.0)
    state, _ = machine.step(state, CoordinatorTick(), 1000.1)
    return "j" in state.jobs, found.over_seconds


@pytest.mark.parametrize("ahead", [0.0, 2 * DAY, 8 * DAY, 3650 * DAY])
def test_a_job_that_just_ended_is_kept_however_far_the_clock_is_ahead(ahead: float) -> None:
    now = 1e9
    kept, age = taken_over(ended=now - 60, newest=now - 1, clock=now + ahead)
    assert kept
    assert 60 <= age <= 60 + JUMP_SECONDS


def test_age_counts_over_leaders_by_what_they_wrote() -> None:
    now = 1e9
    assert not taken_over(ended=now - 8 * DAY, newest=now - 5, clock=now)[0]
    kept, age = taken_over(ended=now - 3 * DAY, newest=now - 5, clock=now)
    assert (kept, age) == (True, 3 * DAY)
    assert taken_over(ended=now, newest=now, clock=now - 9 * DAY) == (True, 0.0), "behind"
    kept, age = taken_over(ended=now - 8 * DAY, newest=0.0, clock=now)
    assert (kept, age) == (True, JUMP_SECONDS), "no journal: its own end is all that was written"


def test_wish_to_stop_ages_by_the_time_for_which_leaders_led() -> None:
    """Whatever their machines' clocks said, and however far stamps jumped from one leader to the next."""
    stop = item("stop", StopRecord(by="alice", seconds=600.0, at=1e9, led=40.0))
    jobs = stored(KEYS, [stop])
    for clock in (1e9, 1e9 - 9 * DAY, 1e9 + 9 * DAY):
        for pages, age in (
            ([], 0.0),
            ([Lines(stamp=1e9 - 5, led=35.0)], 0.0),
            ([Lines(stamp=1e9 + 3, led=43.0), Lines(stamp=1e9 + DAY, led=70.0)], 30.0),
        ):
            times = read_times(jobs, pages, clock)
            assert aged(jobs, times)[0].stop_seconds == age
            assert times.led == 40.0 + age, "the next leader counts on"


def test_wish_of_a_release_that_did_not_count_has_all_of_its_time() -> None:
    jobs = stored(KEYS, [item("stop", StopRecord(by="alice", seconds=600.0, at=1e9))])
    times = read_times(jobs, [Lines(stamp=1e9 + DAY, led=7.0)], 1e9 + DAY)
    assert aged(jobs, times)[0].stop_seconds == 0.0


@pytest.mark.parametrize(
    "wrong", [(8.0, 8.0), (8.0, 4000.0), (-4000.0, 0.0), (4000.0, 0.0), (-30.0, 30.0, -30.0)]
)
@pytest.mark.parametrize("stamped", [True, False])
def test_leaders_with_wrong_clocks_mislead_none_after_them(stamped: bool, wrong: tuple[float, ...]) -> None:
    """A job ends under the first of them, which writes what the next one reads. stamped: a leader of this
    release was there before them, with a right clock."""
    now = 1e9
    before = now if stamped else 0.0
    times = ReadTimes.of(now + wrong[0] * DAY, [now - 60.0], before)
    ended, stamp = times.stamp, times.stamp + 60.0
    for days in (*wrong[1:], 0.0):
        times = ReadTimes.of(now + days * DAY, [ended], stamp)
        assert 0.0 <= times.trusted - ended <= 60.0 + JUMP_SECONDS * len(wrong)
        stamp = times.stamp + 60.0


def test_stamps_of_pages_are_theirs_when_they_are_put_together() -> None:
    assert stamp_of([]) == stamp_of([Lines()]) == 0.0
    assert stamp_of([Lines(stamp=3.0), Lines(stamp=5.0), Lines()]) == 5.0


def test_newest_time_of_the_journal_is_that_of_any_event_or_step() -> None:
    event = EventRecord(id=1, kind="node_up", job="", text="", data={}, time=5.0)
    step = StepRecord(step=0, plan=1, loss=None, tokens=None, seconds=1.0, time=9.0)
    assert newest_of([]) == newest_of([Lines()]) == 0.0
    assert newest_of([Lines(events=(event,)), Lines(steps={"j": (step,)}), Lines(events=(event,))]) == 9.0
