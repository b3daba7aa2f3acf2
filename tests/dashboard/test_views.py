"""What pages show of each state, from messages of a leader that are made by hand."""

from __future__ import annotations

import re
import shlex
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.detection.slowness_history import Slowness, SlownessKind
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.dashboard import device_page, views
from elasticd.dashboard.act_page import ACTS, ActFields, Unusable, request
from elasticd.dashboard.board import Board
from elasticd.dashboard.cluster_page import FAILED_SECONDS
from elasticd.dashboard.history import Sample
from elasticd.dashboard.job_page import job_view, mark
from elasticd.dashboard.stream import Streams
from elasticd.dashboard.subscription import Told
from elasticd.dashboard.switch_page import switch_view
from elasticd.wire import live_types as live
from elasticd.wire.api_types import DeviceStatus, JobStatus, LeaderStatus, LinkStatus, NodeStatus, Pace
from elasticd.wire.event_record import EventRecord
from elasticd.wire.job_time import JobTime
from elasticd.wire.main_thread import Halted
from elasticd.wire.node_health import DeviceHealth, Health
from elasticd.wire.step_record import StepRecord

NOW = 1000.0
JOB = "<b>job</b>"
VIEWER = views.Viewer(signed_in=True, asks=False, role="operator")
PLAN = Plan(
    number=3,
    strategies=(
        Strategy(
            modules=(
                ModulePlan(
                    module="model",
                    pipelines=(
                        Pipeline(
                            stages=(
                                Stage(start=0, stop=2, devices=("a/0", "a/1"), shares=(1, 1)),
                                Stage(start=2, stop=4, devices=("b/0",), shares=(1,)),
                            ),
                            micro_batches=4,
                        ),
                    ),
                ),
            )
        ),
    ),
    micro_batch=1,
    global_batch=4,
    state=StatePolicy(zero=1, replicas=1),
    carriers=("c/0",),
    idle=("b/1",),
)


def node(name: str, devices: int = 2, **fields: Any) -> NodeStatus:
    made = tuple(DeviceStatus(name=f"{name}/{i}", memory=1 << 30, rate=1.0, pace=1.0) for i in range(devices))
    values: dict[str, Any] = {"connected": True, "address": "10.0.0.1", "emulated": False, "devices": made}
    return NodeStatus(node=name, **{**values, **fields})


def job(**fields: Any) -> JobStatus:
    values: dict[str, Any] = {
        "job": JOB,
        "phase": "running",
        "reason": "",
        "plan": None,
        "proposal": None,
        "step": 9,
        "loss": 1.5,
        "tokens_per_second": 100.0,
        "stopping": False,
        "members": (),
    }
    return JobStatus(**{**values, **fields})


HELLO = live.LiveHello(
    id="1:0",
    cluster="test",
    leader=LeaderStatus(name="c", url="http://c", epoch=1),
    release="",
    at=NOW,
    chaos=True,
    newest_event=0,
    detect=DetectSettings(),
)


def board(*news: Any) -> Board:
    """One that has heard a hello, these messages, and their end."""
    found = Board(Streams(1))
    for each in (HELLO, *news, live.Whole(id="1:0")):
        found.hear(Told(at=NOW, news=each))
    return found


def known() -> Board:
    return board(
        live.put("1:0", "node", "a", node("a", members=2)),
        live.put("1:0", "node", "b", node("b", members=1)),
        live.put("1:0", "node", "c", node("c", devices=1, members=1)),
        live.put("1:0", "node", "d", node("d", draining=True)),
        live.put("1:0", "node", "e", node("e", connected=False)),
        live.put("1:0", "node", "f", node("f")),
        live.put("1:0", "job", JOB, live.LiveJob(job=job(), plan=3, over=False)),
        live.put("1:0", "plan", JOB, PLAN),
    )


def cells(found: Board) -> dict[str, views.DeviceCell]:
    return {cell.name: cell for row in found.hello(VIEWER).nodes for cell in row.devices}


def test_each_state_of_a_device_has_its_word() -> None:
    found = known()
    slow = {"a/0": Slowness(kind=SlownessKind.PERSISTENT, reason="slow for 300 steps now")}
    found.hear(
        Told(
            at=NOW, news=live.append("1:1", "slowdowns", "", live.Slowdowns(rates={"a/0": 2.5}, slowness=slow))
        )
    )
    halted = Halted(job=JOB, device="a/1", incarnation="i", place="loss.py:3", step=8, seconds=20.0, stack="s")
    waits = msgspec.structs.replace(halted, device="b/0", waits=True)
    halts = {"a/1": halted, "b/0": waits}
    found.hear(Told(at=NOW, news=live.put("1:2", "halts", JOB, halts)))
    found.look(NOW)
    words = {name: cell.state for name, cell in cells(found).items()}
    assert words == {
        "a/0": "slow",
        "a/1": "hung",
        "b/0": "healthy",
        "b/1": "standby",
        "c/0": "state",
        "d/0": "drained",
        "d/1": "drained",
        "e/0": "unreachable",
        "e/1": "unreachable",
        "f/0": "unused",
        "f/1": "unused",
    }
    view = found.hello(VIEWER)
    assert [(row.name, row.state) for row in view.abnormal] == [
        *(("a/1", "hung"), ("e", "unreachable"), ("a/0", "slow"), ("d", "drained")),
    ]
    assert view.abnormal[2].why == "persistent: slow for 300 steps now"
    assert view.abnormal[0].why == "loss.py:3"
    assert cells(found)["a/1"].place == (0, 0, 0, 0, 1)
    assert sum(view.counts.values()) == 11


def test_a_page_that_begins_between_two_looks_has_devices_as_they_are_now() -> None:
    """A worker went on, a node is gone and one is there, and browsers have not been told yet."""
    found = known()
    halted = Halted(job=JOB, device="a/1", incarnation="i", place="loss.py:3", step=8, seconds=20.0, stack="s")
    found.hear(Told(at=NOW, news=live.put("1:1", "halts", JOB, {"a/1": halted})))
    assert cells(found)["a/1"].state == "hung"
    found.look(NOW)
    found.hear(Told(at=NOW, news=live.put("1:2", "halts", JOB, {})))
    assert cells(found)["a/1"].state == "healthy"
    found.hear(Told(at=NOW, news=live.Drop(id="1:3", kind="node", key="f")))
    found.hear(Told(at=NOW, news=live.put("1:4", "node", "g", node("g", devices=1))))
    between = found.hello(VIEWER)
    assert [row.node for row in between.nodes] == ["a", "b", "c", "d", "e", "g"]
    assert [row.name for row in between.abnormal] == ["e", "d"]
    told: list[tuple[str, Any]] = []
    found.streams.tell = lambda event, value: told.append((event, value))  # type: ignore[method-assign]
    found.look(NOW + 1)
    (devices,) = [value for event, value in told if event == "devices"]
    assert [cell.name for cell in devices.devices] == ["a/1"], "pages that were there before are told still"
    assert (devices.gone, [row.node for row in devices.nodes]) == (("f",), ["g"])
    after = found.hello(VIEWER)
    assert (after.nodes, after.counts, after.abnormal) == (between.nodes, between.counts, between.abnormal)


def test_a_node_that_comes_back_before_the_next_look_stays_on_the_page() -> None:
    found = known()
    found.look(NOW)
    found.hear(Told(at=NOW, news=live.Drop(id="1:1", kind="node", key="f")))
    found.hear(Told(at=NOW, news=live.put("1:2", "node", "f", node("f"))))
    assert "f/0" in cells(found)
    found.look(NOW + 1)
    assert "f/0" in cells(found)


def test_a_node_that_drains_is_draining_while_plans_use_it() -> None:
    found = known()
    found.hear(Told(at=NOW, news=live.put("1:1", "node", "a", node("a", members=2, draining=True))))
    found.look(NOW)
    assert cells(found)["a/0"].state == "draining"
    (row,) = [row for row in found.hello(VIEWER).abnormal if row.name == "a"]
    assert (row.state, row.why) == ("draining", "jobs still use 2 of its devices")


def test_a_device_that_is_hot_is_suspect_before_it_is_slow() -> None:
    found = known()
    health = Health(devices=(DeviceHealth(name="a/0", temperature=95.0, xids=(79,)),))
    found.hear(Told(at=NOW, news=live.put("1:1", "health", "a", health)))
    (row,) = [row for row in found.hello(VIEWER).abnormal if row.name == "a/0"]
    assert row.state == "suspect"
    assert "it is at 95 °C" in row.why
    assert "XID 79" in row.why


def event(kind: str, text: str = "", job: str = JOB, at: float = NOW, **data: Any) -> live.Append:
    told = EventRecord(id=round(at), time=at, kind=kind, job=job, text=text, data=data)
    return live.append("1:1", "event", told.job, told)


def jobs_not_normal(found: Board, at: float) -> list[tuple[str, str]]:
    """By the table that browsers are told up to a moment, and by what they hear who come then."""
    told: list[views.LiveDevices] = []
    found.streams.tell = lambda event, value: told.append(value) if event == "devices" else None  # type: ignore[method-assign]
    found._stale = True
    found.look(at - 1)
    found.hear(Told(at=at, news=live.LeaderPulse(id="1:9", at=at, store_away=False, paused=False)))
    found.look(at)
    found.look(at + 1)
    found._hello = None
    now = found.hello(VIEWER).abnormal
    assert told[-1].abnormal == now
    return [(row.name, row.state) for row in now if row.what == "job"]


def test_a_job_that_waits_is_not_normal_and_names_are_text() -> None:
    found = known()
    waits = job(phase="assembling", reason="it waits for beta")
    found.hear(
        Told(at=NOW, news=live.put("1:1", "job", waits.job, live.LiveJob(job=waits, plan=3, over=False)))
    )
    found.look(NOW)
    assert [(row.name, row.state, row.why) for row in found.hello(VIEWER).abnormal if row.what == "job"] == [
        (JOB, "waits", "it waits for beta")
    ]


def test_a_failure_is_news_for_some_minutes_and_then_a_job_that_is_over() -> None:
    found = known()
    failed = job(phase="stopped", reason="nothing is left of layer 3")
    found.hear(
        Told(at=NOW, news=live.put("1:1", "job", failed.job, live.LiveJob(job=failed, plan=3, over=True)))
    )
    found.hear(Told(at=NOW, news=event("stopped", orderly=False)))
    found.look(NOW)
    view = found.hello(VIEWER)
    assert (view.abnormal[0].name, view.abnormal[0].state) == (JOB, "failed")
    assert view.abnormal[0].why == "has failed: nothing is left of layer 3"
    assert (view.jobs[0].phase, view.jobs[0].sentence) == ("failed", "has failed: nothing is left of layer 3")
    assert cells(found)["a/0"].state == "unused", "a job that is over has no devices"
    assert jobs_not_normal(found, NOW + FAILED_SECONDS - 1) == [(JOB, "failed")]
    assert jobs_not_normal(found, NOW + FAILED_SECONDS + 1) == []
    assert found.hello(VIEWER).jobs[0].phase == "failed", "it is listed among those that are over"


def test_a_job_whose_failure_was_before_all_that_is_remembered_is_no_news() -> None:
    found = known()
    found.hear(
        Told(
            at=NOW, news=live.put("1:1", "job", JOB, live.LiveJob(job=job(phase="stopped"), plan=3, over=True))
        )
    )
    assert jobs_not_normal(found, NOW) == []


def test_a_job_that_somebody_stopped_or_that_is_done_is_normal() -> None:
    found = known()
    stopped = job(phase="stopped", reason="stopped by alice", orderly=True)
    for news in (
        live.put("1:1", "job", stopped.job, live.LiveJob(job=stopped, plan=3, over=True)),
        event("stopped", orderly=True),
        live.put("1:1", "job", "other", live.LiveJob(job=job(job="other", phase="done"), plan=3, over=True)),
    ):
        found.hear(Told(at=NOW, news=news))
    assert jobs_not_normal(found, NOW) == []
    assert {row.phase for row in found.hello(VIEWER).jobs} == {"stopped", "done"}


@pytest.mark.parametrize(("phase", "state"), [("failed", ["failed"]), ("stopped", []), ("finished", [])])
def test_a_job_in_restart_mode_is_news_only_where_it_failed(phase: str, state: list[str]) -> None:
    found = known()
    over = msgspec.structs.replace(restarting(5, NOW), phase=phase)
    found.hear(Told(at=NOW, news=live.put("1:1", "restarts", "", (over,))))
    found.hear(Told(at=NOW, news=event("stopped", job="ddp", orderly=phase != "failed")))
    assert [state for _, state in jobs_not_normal(found, NOW)] == state
    assert jobs_not_normal(found, NOW + FAILED_SECONDS + 1) == []


def test_a_device_that_is_slow_again_is_slow_since_then() -> None:
    """That another job found it slow before says nothing of how long it is."""
    found = known()
    found.hear(Told(at=NOW, news=event("slow", device="a/0", at=NOW)))
    for at, rate in ((NOW, 2.0), (NOW + 10, 1.0), (NOW + 500, 2.0)):
        found.hear(
            Told(
                at=at,
                news=live.append("1:1", "slowdowns", "", live.Slowdowns(rates={"a/0": rate}, slowness={})),
            )
        )
        if at > NOW + 100:
            found.hear(Told(at=at, news=event("slow", device="a/0", at=at)))
    found.look(NOW + 500)
    (row,) = [row for row in found.hello(VIEWER).abnormal if row.name == "a/0"]
    assert row.since == NOW + 500


def measured_step(found: Board, number: int, seconds: float, computed: float, **fields: Any) -> list[Any]:
    """A step, as a leader tells it: the job's status, the step, and what its members measured. Returns what
    browsers were told."""
    told: list[tuple[str, Any]] = []
    found.streams.tell = lambda event, value: told.append((event, value))  # type: ignore[method-assign]
    columns = ("block_seconds", "embed_seconds", "head_seconds")
    numbers = np.full((len(PLAN.members), 3), computed / 3, "<f4")
    at = NOW + number
    status = job(step=number + 1, step_seconds=seconds, wall_seconds=2 * seconds, **fields)
    step = StepRecord(step=number, plan=3, loss=1.0, tokens=100 + number % 2, seconds=seconds, time=at)
    table = live.MeasuredStep(plan=3, step=number, numbers=numbers.tobytes(), columns=columns, lengths={})
    for news in (
        live.put("1:1", "job", status.job, live.LiveJob(job=status, plan=3, over=False)),
        live.append("1:1", "step", JOB, step),
        live.append("1:1", "measured", JOB, table),
    ):
        found.hear(Told(at=at, news=news))
    found.look(at)
    return [value for event, value in told if event == "step"]


SECONDS = st.floats(0.1, 10.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=6), SECONDS)
def test_head_and_last_point_of_the_chart_are_the_same_and_nothing_exceeds_the_bound(
    steps: list[tuple[float, float]], predicted: float
) -> None:
    """Steps of other sizes, that compute faster or slower than those that the profile was fitted to."""
    found = known()
    for number, (seconds, part) in enumerate(steps):
        (told,) = measured_step(found, number, seconds, seconds * part / 10, predicted_seconds=predicted)
    head = job_view(found.known, JOB, (), NOW + 10).head
    names = ("within_steps", "predicted", "bound")
    point = {name: getattr(told, name) for name in names}
    for row in (head, told.head, found.hello(VIEWER).jobs[0]):
        assert {name: getattr(row, name) for name in names} == point
    assert point["within_steps"] == pytest.approx((100 + told.step % 2) / told.seconds)
    assert head.step == told.step + 1
    assert point["bound"] is not None
    assert point["bound"] >= max(point["within_steps"], point["predicted"])
    assert head.tokens_per_second == told.head.tokens_per_second == 100.0, "of the newest ten steps"


def test_a_guess_is_no_prediction_of_a_step_and_moves_no_bound() -> None:
    found = known()
    fields = {"predicted_seconds": 1e-4, "prediction_guessed": True}
    for number in range(2):
        (told,) = measured_step(found, number, 1.0, 0.8, **fields)
    assert told.predicted is told.head.predicted is None
    assert told.bound is not None
    assert told.bound < 200


def restarting(step: int, heard: float) -> live.RestartingJob:
    return live.RestartingJob(
        job="ddp",
        round=2,
        step=step,
        step_seconds=0.5,
        heard=heard,
        devices={"f/0": Pace(seconds=0.4, ratio=1.0)},
        out={"torchrun-3": "its node is slow"},
    )


def test_jobs_in_restart_mode_and_slow_links_are_told_as_they_change() -> None:
    found = known()
    found.look(NOW)
    told: list[tuple[str, Any]] = []
    found.streams.tell = lambda event, value: told.append((event, value))  # type: ignore[method-assign]
    for number in range(4):
        found.hear(Told(at=NOW, news=live.put("1:1", "restarts", "", (restarting(number // 2, NOW),))))
        found.look(NOW + 1 + number)
    rows = [value.row for event, value in told if event == "plan"]
    assert [(row.job, row.step) for row in rows] == [("ddp", None), ("ddp", 1)]
    found.look(NOW + 60)
    assert "silent for 60 s" in told[-2][1].row.sentence
    slow = LinkStatus(link="a - c", bandwidth=1e8, latency=1e-4, rate=4.0)
    found.hear(Told(at=NOW, news=live.put("1:2", "links", "", (slow,))))
    found.hear(Told(at=NOW, news=live.put("1:3", "restarts", "", ())))
    found.look(NOW + 61)
    by_event = dict(told)
    assert [link.link for link in by_event["leader"].links] == ["a - c"]
    assert "a - c" in [row.name for row in by_event["devices"].abnormal]
    assert by_event["plan"].gone


def test_a_job_in_restart_mode_has_a_row_and_a_page() -> None:
    found = known()
    found.hear(Told(at=NOW, news=live.put("1:1", "restarts", "", (restarting(5, time.time() - 60.0),))))
    row = found.hello(VIEWER).jobs[-1]
    assert (row.job, row.phase) == ("ddp", "restart mode")
    assert "silent for 60 s" in row.sentence
    page = job_view(found.known, "ddp", (), NOW)
    assert page.restart is not None
    assert page.restart.out == {"torchrun-3": "its node is slow"}
    (device,) = page.restart.devices
    assert (device.device, device.seconds, device.ratio) == ("f/0", 0.4, 1.0)


def test_a_page_of_a_job_that_says_nothing_of_steps_has_devices_and_no_steps() -> None:
    found = known()
    job = msgspec.structs.replace(
        restarting(0, 0.0),
        round=-1,
        devices={},
        out={},
        workers=2,
        ran_on=("f/0", "f/1"),
        failure="KeyError: 1",
    )
    found.hear(Told(at=NOW, news=live.put("1:1", "restarts", "", (job,))))
    page = job_view(found.known, "ddp", (), NOW)
    assert page.head.step is None
    assert page.restart is not None
    assert (page.restart.round, page.restart.step_seconds, page.restart.workers) == (None, None, 2)
    assert [(each.device, each.seconds) for each in page.restart.devices] == [("f/0", None), ("f/1", None)]
    assert page.restart.failure == "KeyError: 1"


class Pages:
    """The rows of jobs as a browser has them from the stream (static/news.js)."""

    def __init__(self, board: Board) -> None:
        self.rows = {row.job: row for row in board.hello(VIEWER).jobs}
        board.streams.tell = self.take  # type: ignore[method-assign]

    def take(self, event: str, value: Any) -> None:
        if event == "plan":
            self.rows.pop(value.row.job, None)
            if not value.gone:
                self.rows[value.row.job] = value.row


@pytest.mark.parametrize("first", ["job", "restarts"])
def test_a_job_that_goes_on_in_restart_mode_has_one_row_whatever_is_told_first(first: str) -> None:
    """A launch begins in live mode, which ends once its script is known to make no Job."""
    found = known()
    pages = Pages(found)
    begun = live.put(
        "1:1", "job", "ddp", live.LiveJob(job=job(job="ddp", phase="assembling"), plan=0, over=False)
    )
    gone = live.Drop(id="1:1", kind="job", key="ddp")
    runs = live.put("1:1", "restarts", "", (msgspec.structs.replace(restarting(0, NOW), phase="running"),))
    for number, news in enumerate([begun, gone, runs] if first == "job" else [begun, runs, gone]):
        found.hear(Told(at=NOW, news=news))
        found.look(NOW + 2 * number)
        found.look(NOW + 2 * number + 1)
    assert {name: row.phase for name, row in pages.rows.items()} == {JOB: "running", "ddp": "restart mode"}
    found._hello = None
    assert {row.job: row.phase for row in found.hello(VIEWER).jobs} == {JOB: "running", "ddp": "restart mode"}
    ended = msgspec.structs.replace(runs.value[0], phase="failed")
    found.hear(Told(at=NOW, news=live.put("1:1", "restarts", "", (ended,))))
    found.hear(Told(at=NOW, news=begun))  # and it is started again
    found.look(NOW + 10)
    found.look(NOW + 11)
    assert pages.rows["ddp"].phase == "assembling"


def test_slow_links_are_listed_and_others_are_not() -> None:
    found = known()
    links = (
        LinkStatus(link="a - b", bandwidth=1e9, latency=1e-4, rate=1.0),
        LinkStatus(link="a - c", bandwidth=1e8, latency=1e-4, rate=4.0),
    )
    found.hear(Told(at=NOW, news=live.put("1:1", "links", "", links)))
    view = found.hello(VIEWER)
    assert [link.link for link in view.links] == ["a - c"]
    assert ("link", "a - c") in [(row.what, row.name) for row in view.abnormal]


def test_half_a_hello_is_never_shown_and_a_lost_leader_leaves_what_was_known() -> None:
    found = known()
    before = found.hello(VIEWER)
    hello = live.LiveHello(
        id="2:0",
        cluster="test",
        leader=LeaderStatus(name="d", url="http://d", epoch=2),
        release="",
        at=NOW,
        chaos=False,
        newest_event=0,
        detect=DetectSettings(),
    )
    found.hear(Told(at=NOW, news=hello))
    found.hear(Told(at=NOW, news=live.put("2:0", "node", "z", node("z"))))
    assert found.hello(VIEWER).nodes == before.nodes
    found.hear(Told(at=NOW + 5, lost="it is gone"))
    shown = found.hello(VIEWER)
    assert shown.nodes == before.nodes
    assert shown.leader.trouble == "it is gone"
    assert shown.leader.since == NOW + 5
    found.hear(Told(at=NOW + 6, news=hello))
    found.hear(Told(at=NOW + 6, news=live.Whole(id="2:0")))
    assert found.hello(VIEWER).nodes == ()
    assert found.hello(VIEWER).leader.name == "d"


@pytest.mark.parametrize("ahead", [-120.0, 0.0, 120.0])
def test_times_are_by_the_leaders_clock_whatever_this_machines_says(ahead: float) -> None:
    found = Board(Streams(1))
    ours, theirs = NOW - ahead, NOW
    spent = JobTime(began=NOW - 100.0, last=NOW - 0.5, productive=98.0, steps=98, repeated=0, healthy=1.0)
    for each in (
        HELLO,
        live.put("1:0", "job", JOB, live.LiveJob(job=job(), plan=3, over=False, time=spent)),
        live.LeaderPulse(id="1:0", at=theirs, store_away=False, paused=False),
        live.Whole(id="1:0"),
    ):
        found.hear(Told(at=ours, news=each))
    told: list[tuple[str, Any]] = []
    found.streams.tell = lambda event, value: told.append((event, value))  # type: ignore[method-assign]
    found.look(ours)
    pulse = told[-1][1]
    assert (pulse.heard, pulse.now) == (theirs, theirs)
    page = job_view(found.known, JOB, (), found.known.time(ours))
    assert page.head.ettr == pytest.approx(spent.ettr(theirs))
    assert page.lost == (), "it is not stalled"
    assert page.wall_seconds == 100.0


def test_only_cells_that_changed_are_told() -> None:
    found = known()
    found.look(NOW)
    told: list[tuple[str, Any]] = []
    found.streams.tell = lambda event, value: told.append((event, value))  # type: ignore[method-assign]
    found.look(NOW + 1)
    assert [event for event, _ in told] == ["leader"]
    found.hear(
        Told(at=NOW, news=live.append("1:1", "slowdowns", "", live.Slowdowns(rates={"a/0": 2.5}, slowness={})))
    )
    found.look(NOW + 2)
    (devices,) = [value for event, value in told if event == "devices"]
    assert [cell.name for cell in devices.devices] == ["a/0"]
    assert devices.nodes == ()
    assert devices.abnormal is not None


def test_a_switch_says_whom_it_waits_for() -> None:
    said = [live.RankNews(device="a/0", at=11.0, what="prepared")]
    view = switch_view(JOB, 3, PLAN, None, said, ())
    assert view.phase == "preparing"
    assert "it waits for a/1" in view.sentence
    assert len(view.ranks) == len(PLAN.members)


def test_a_job_is_stopped_without_a_checkpoint_only_where_that_is_asked_for() -> None:
    job = ActFields(job="j", confirm="j")
    made = request("stop", job, "x")
    assert (made.body["seconds"], made.command) == (600.0, "elasticd stop --wait 600 j")
    for seconds in (0.0, -1.0):
        with pytest.raises(Unusable, match="stop-now"):
            request("stop", msgspec.structs.replace(job, seconds=seconds), "x")
    made = request("stop-now", job, "x")
    assert (made.body["seconds"], made.command) == (0.0, "elasticd stop --now j")
    assert request("chaos-cut", ActFields(node="n", confirm="n"), "x").body["seconds"] == 0.0


@pytest.mark.parametrize("name", ACTS)
def test_each_act_has_its_command_line_and_refuses_what_it_lacks(name: str) -> None:
    act = ACTS[name]
    fields = {
        "node": "alpha one",
        "device": "alpha/1",
        "job": "my job",
        "key": "detect.slow",
        "value": 1.3,
        "factor": 3.0,
        "seconds": 5.0,
    }
    given = {field: fields[field] for field in act.fields if field in fields}
    if act.confirm:
        with pytest.raises(Unusable, match="confirm"):
            request(name, ActFields(**given), "x")
        given["confirm"] = given[act.confirm]
    made = request(name, ActFields(**given), "x")
    # What the page shows, made from the words of the act and the same values, is what was asked for.
    shown = re.sub(r"\[(.*?)\] ", lambda found: "" if "OTHER" in found[1] else f"{found[1]} ", act.command)
    for field in act.fields:
        if field in fields:
            value = fields[field]
            said = f"{value:g}" if isinstance(value, float) else str(value)
            shown = re.sub(rf"\b{field.upper()}\b", shlex.quote(said), shown)
    assert made.command == shown
    assert " ".join(made.command.split()[:2]) == " ".join(act.command.split()[:2])
    assert " " not in made.path
    if act.fields:
        with pytest.raises(Unusable):
            request(name, ActFields(), "x")


def slow_event(job: str, number: int, step: int, before: float, after: float) -> EventRecord:
    kind = "slow" if after > before else "recovered"
    data = {"device": "a/0", "before": before, "after": after, "step": step}
    return EventRecord(id=number, time=NOW + number, kind=kind, job=job, text="", data=data)


def test_each_episode_has_its_job_and_time_and_none_ends_before_it_begins() -> None:
    """A run that ends while a device is slow leaves no event of that; the next run's steps begin anew."""
    told = [
        slow_event("first", 1, 124, 1.0, 2.0),  # and the job ends
        slow_event("second", 2, -1, 1.0, 3.0),
        slow_event("second", 3, 10, 3.0, 4.0),
        slow_event("second", 4, 26, 4.0, 1.0),
        slow_event("second", 5, 30, 1.0, 2.0),  # it ends, and is started again under its name
        slow_event("second", 6, -1, 1.0, 1.5),
    ]
    shown = [
        (each.start.job, each.start.step, each.stop.step if each.stop else None, each.now, each.slowdown)
        for each in device_page._episodes(told[::-1], now=True)
    ]
    assert shown == [
        ("first", 124, None, False, 2.0),
        ("second", None, 26, False, 4.0),
        ("second", 30, None, False, 2.0),
        ("second", None, None, True, 1.5),
    ]
    assert not device_page._episodes(told[::-1], now=False)[-1].now, "that job is over"
    times = [
        (each.start.time, each.stop.time) for each in device_page._episodes(told[::-1], now=True) if each.stop
    ]
    assert all(start < stop for start, stop in times)


def test_the_line_of_a_devices_slowdown_breaks_between_two_jobs() -> None:
    samples = [Sample("a/0", NOW + at, step, 2.0, 2.0, None) for at, step in ((0, 5), (1, 6), (60, 0), (61, 1))]
    found = device_page._slowdown(samples)
    assert [value is None for value in found.measured] == [False, False, True, False, False]
    assert list(found.time) == sorted(found.time)


def test_a_mark_of_before_the_first_step_stands_by_its_time() -> None:
    assert mark(slow_event(JOB, 1, -1, 1.0, 2.0)).step is None
    assert mark(slow_event(JOB, 1, 0, 1.0, 2.0)).step == 0


def test_a_nodes_health_breaks_where_its_agent_was_away() -> None:
    """Nothing is drawn across a time in which nothing was told, nor of a node that told nothing at all."""
    told = [(NOW + 30.0 * n, Health(stolen=0.1)) for n in (0, 1, 2, 20, 21)]
    found = device_page._health("a/0", told)
    column = found.values["node stolen"]
    assert [value is None for value in column] == [False, False, False, True, False, False]
    assert list(found.time) == sorted(found.time)
    assert device_page._health("a/0", []).time == ()
