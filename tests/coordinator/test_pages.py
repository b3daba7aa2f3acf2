"""The journal in the store: what one leader told, later ones have."""

from __future__ import annotations

import asyncio
import re
from random import Random
from typing import Any

import msgspec
import pytest
from elasticd_planner.spec.measurement import Measurement
from hypothesis import given
from hypothesis import strategies as st

from elasticd.coordinator.events import event_log as journals
from elasticd.coordinator.events import event_pages as module
from elasticd.coordinator.events.event_log import EventLog
from elasticd.coordinator.events.event_pages import MOST_EVENTS, MOST_STEPS, TOGETHER, Pages
from elasticd.explain.switch_gain import AFTER, BEFORE, Gain, gain_of
from elasticd.machines.job.state.events import CoordinatorNote
from elasticd.records import Keys
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.store.protocol import KeyValue
from elasticd.wire.coordinator import FromClient
from elasticd.wire.worker import Report
from tests.coordinator.agents import agent, coordinating, get, until
from tests.machines.cast import node_record

KEYS = Keys(cluster="test")


def report(step: int, plan: int = 1, seconds: float = 1.0) -> Report:
    measured = Measurement(
        device="a/0", plan=plan, step=step, tokens=9, block_seconds=1, block_work=9, step_seconds=seconds
    )
    return Report(measurement=measured, loss=1.0, tokens=9)


class Shop:
    """Leaders that follow each other on one store."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.writes: list[int] = []
        self.term = 0
        self.lead()

    def lead(self) -> None:
        self.term += 1
        items = [
            KeyValue(key=key, value=value, mod_revision=1, create_revision=1, version=1)
            for key, value in self.stored.items()
        ]
        self.pages = Pages(KEYS, items)
        self.journal = EventLog(term=self.term)
        for lines in self.pages.restored():
            self.journal.restore(lines)

    def write(self) -> None:
        while (lines := self.journal.new(MOST_EVENTS, MOST_STEPS)) is not None:
            paged = self.pages.written(lines)
            for key in paged.gone:
                del self.stored[key]  # it was there
            self.stored[paged.key] = paged.value
            self.writes.append(len(paged.value))


ACTIONS = st.lists(st.sampled_from(["event", "step", "again", "write", "lead"]), max_size=120)


@given(ACTIONS, st.integers(1, 4))
def test_a_later_leader_has_all_that_was_written_in_order(actions: list[str], together: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOGETHER", together)
        shop, events, step = Shop(), list[str](), 0
        for number, action in enumerate(actions):
            if action == "event":
                shop.journal.tell(CoordinatorNote(kind="slow", text=str(number)), time=1.0)
                events.append(str(number))
            elif action in ("step", "again"):
                step = max(1, step - 3) if action == "again" else step + 1
                shop.journal.report("demo", report(step), time=float(number))
            if action in ("write", "lead"):
                shop.write()
            if action == "lead":
                told = shop.journal.events(), shop.journal.steps("demo")
                shop.lead()
                assert (shop.journal.events(), shop.journal.steps("demo")) == told
        ids = [event.id for event in shop.journal.events()]
        assert ids == sorted(set(ids))
        assert [event.text for event in shop.journal.events()] == events


def test_a_cursor_misses_nothing_when_the_leader_changes() -> None:
    """Also where the last events of the old one were read by somebody and never written."""
    shop = Shop()
    shop.journal.tell(CoordinatorNote(kind="slow", text="kept"), time=1.0)
    shop.write()
    cursor = shop.journal.tell(CoordinatorNote(kind="slow", text="read and lost"), time=2.0).id
    shop.lead()
    shop.journal.tell(CoordinatorNote(kind="slow", text="new"), time=3.0)
    assert [event.text for event in shop.journal.events(cursor)] == ["new"]
    assert [event.text for event in shop.journal.events()] == ["kept", "new"]


def test_pages_are_put_together_and_each_line_is_written_about_twice() -> None:
    shop = Shop()
    for number in range(20 * TOGETHER):
        shop.journal.tell(CoordinatorNote(kind="slow", text=f"{number}"), time=1.0)
        shop.write()
    assert len(shop.stored) < TOGETHER + 20
    assert sum(shop.writes) < 3 * sum(shop.writes[: TOGETHER - 1]) * 20
    shop.lead()
    assert [event.text for event in shop.journal.events()] == [str(n) for n in range(20 * TOGETHER)]


def test_what_is_kept_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)
    shop, draw = Shop(), Random(1)
    for number in range(2000):
        shop.journal.tell(CoordinatorNote(kind="slow", text=f"{number} {draw.random()}"), time=1.0)
        shop.write()
        assert sum(map(len, shop.stored.values())) <= 20_000
        if number % 700 == 0:
            shop.lead()
    shop.lead()
    told = [int(event.text.split()[0]) for event in shop.journal.events()]
    assert told == [*range(told[0], 2000)]
    assert 0 < told[0] < 1900


def test_an_event_that_is_too_large_leaves_its_data_behind() -> None:
    shop = Shop()
    shop.journal.tell(
        CoordinatorNote(kind="defect", text="t" * 9000, data={"traceback": "x" * 100_000}), time=1.0
    )
    shop.write()
    shop.lead()
    (event,) = shop.journal.events()
    assert event.text == "t" * 2048
    (why,) = event.data.values()
    assert re.fullmatch(r"of 109\d\d\d bytes, not kept beyond the leader that told it", why)


def test_a_page_fits_into_one_request_whatever_was_told() -> None:
    """Many jobs after an outage; texts that cannot be compressed."""
    shop, draw = Shop(), Random(1)
    for step in range(1, 40):
        for job in range(300):
            shop.journal.report(f"job-{job}", report(step), time=1.0)
    for _ in range(300):
        shop.journal.tell(CoordinatorNote(kind="slow", text=draw.randbytes(7000).hex()), time=1.0)
    shop.write()
    assert max(shop.writes) < 1 << 20
    shop.lead()
    assert len(shop.journal.steps("job-299")) == 39


def test_a_page_that_is_refused_changes_nothing() -> None:
    shop = Shop()
    for number in range(2 * TOGETHER):
        shop.journal.tell(CoordinatorNote(kind="slow", text=f"{number}"), time=1.0)
        if number % 7 == 3:
            lines = shop.journal.new(MOST_EVENTS, MOST_STEPS)
            assert lines is not None
            shop.pages.written(lines)
            shop.pages.refused()
        else:
            shop.write()
    shop.lead()
    told = [int(event.text) for event in shop.journal.events()]
    assert told == [number for number in range(2 * TOGETHER) if number % 7 != 3]


@pytest.mark.parametrize(
    "value", [b"", b"{}", b'{"type":"journal-page","version":1,"lines":"AAAA"}', b"[" * 9999]
)
def test_a_page_that_cannot_be_read_is_skipped(value: bytes) -> None:
    shop = Shop()
    for text in ("first", "second"):
        shop.journal.tell(CoordinatorNote(kind="slow", text=text), time=1.0)
        shop.write()
    shop.stored[min(shop.stored)] = value
    shop.stored[f"{KEYS.journal}quota"] = b"of another release"
    shop.lead()
    assert [event.text for event in shop.journal.events()] == ["second"]
    shop.journal.tell(CoordinatorNote(kind="slow", text="third"), time=1.0)
    shop.write()
    assert len(shop.stored) == 4


def seconds(*plans: tuple[int, int, float]) -> list[tuple[int, int, float]]:
    """Step, plan and seconds of each step: so many under each plan."""
    made = [(number, each) for number, count, each in plans for _ in range(count)]
    return [(step, number, each) for step, (number, each) in enumerate(made, 1)]


def gains(journal: EventLog, steps: list[tuple[int, int, float]]) -> list[tuple[int, Gain]]:
    found = []
    for step, plan, each in steps:
        gain = journal.report("demo", report(step, plan, each), time=float(step))
        if gain is not None:
            found.append((step, gain))
            journal.tell(CoordinatorNote(kind="gained", job="demo", text="", data={"number": plan}), time=1.0)
    return found


def test_what_a_switch_gained_is_told_once_after_as_many_steps_as_its_median_takes() -> None:
    journal = EventLog()
    steps = seconds((1, 10, 3.0), (2, 40, 1.0), (3, 30, 2.0))
    ((first, gain), (second, _)) = gains(journal, steps)
    assert (first, second) == (10 + AFTER + 1, 50 + AFTER + 1)
    assert gain == gain_of(2, journal.steps("demo"), 0.0) == Gain(before=3.0, after=1.0, pause=0.0)
    assert gains(journal, [(80 - n, 3, 2.0) for n in (5, 4, 3, 2, 1, 0)]) == [], "steps that are made again"


def test_a_switch_with_few_steps_before_it_gained_nothing_that_is_known() -> None:
    assert gains(EventLog(), seconds((1, BEFORE - 1, 3.0), (2, 60, 1.0))) == []


def test_a_plan_that_answers_a_fault_gained_nothing_by_itself() -> None:
    """The plan before it could not run any more, however long its steps were."""
    steps = seconds((1, 10, 2.0), (4, 60, 1.0))
    fence = CoordinatorNote(kind="fenced", job="demo", text="", data={"number": 3, "gone": []})
    journal = EventLog()
    journal.tell(fence, time=1.0)
    ((_, gain),) = gains(journal, steps)
    assert (gain.faulted, gain.about) == (True, "after a fault")
    assert "paid back" not in gain.text
    for other in ({"number": 1}, {"number": 5}):
        journal = EventLog()
        journal.tell(msgspec.structs.replace(fence, data=other), time=1.0)
        ((_, gain),) = gains(journal, steps)
        assert not gain.faulted, "a fault before the plan before it, or after this one"
        assert gain.text.endswith("paid back in 1 step")


def test_a_later_leader_tells_the_gain_of_a_switch_before_it_and_none_twice() -> None:
    shop = Shop()
    steps = seconds((1, 10, 3.0), (2, 60, 1.0))
    assert gains(shop.journal, steps[:20]) == []
    shop.write()
    shop.lead()
    assert len(gains(shop.journal, steps[20:40])) == 1
    shop.write()
    shop.lead()
    assert gains(shop.journal, [(10 + n, 2, 1.0) for n in range(1, 60)]) == []


def test_no_more_is_kept_than_a_leader_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = EventLog(events=5, steps=5)
    for number in range(1, 9):
        journal.tell(CoordinatorNote(kind="slow", text=str(number)), time=1.0)
        journal.report("demo", report(number), time=1.0)
    lines = journal.new(100, 100)
    assert lines is not None
    assert (len(lines.events), len(lines.steps["demo"])) == (5, 5)
    assert journal.new(100, 100) is None


def test_the_next_coordinator_answers_with_what_the_one_before_told() -> None:
    async def body() -> None:
        server = MemoryServer()
        async with coordinating(server) as first, agent(first, node_record("alpha")) as alpha:
            await until(lambda: any(event.kind == "node_up" for event in first.leading.journal.events()))
            await alpha.tell(
                FromClient(client="c", job="demo", device="alpha/0", incarnation="i", body=of_alpha(7))
            )
            first.leading.journal.report("demo", report(1), time=1.0)
            _, told = await get(first, "/v1/events")
            await until(lambda: bool(MemoryStore(server).snapshot(KEYS.journal).items))  # also before its end
        async with coordinating(server) as second:
            _, after = await get(second, "/v1/events")
            assert after["events"][: len(told["events"])] == told["events"]
            assert second.leading.journal.steps("demo") == [], "of a job that there is not nobody asks"
            cursor: Any = told["events"][-1]["id"]
            _, rest = await get(second, f"/v1/events?after={cursor}")
            assert [e["id"] for e in rest["events"]] == [e["id"] for e in after["events"] if e["id"] > cursor]

    asyncio.run(body())


def of_alpha(step: int) -> Report:
    measured = msgspec.structs.replace(report(step).measurement, device="alpha/0")
    return msgspec.structs.replace(report(step), measurement=measured)


def test_ids_of_a_leader_that_told_more_than_a_term_has_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "EVENTS_OF_A_TERM", 3)
    shop = Shop()
    for number in range(20):
        shop.journal.tell(CoordinatorNote(kind="slow", text=str(number)), time=1.0)
    shop.write()
    last = shop.journal.events()[-1].id
    shop.lead()
    assert shop.journal.tell(CoordinatorNote(kind="slow", text="x"), time=1.0).id == last + 1
