"""`top`, `why`, `history` and `logs`: what is drawn of a status, steps, events and plans."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from elasticd_planner.detection.slowness_history import Slowness, SlownessKind
from elasticd_planner.placement.state_movement import strategy
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Device, Node
from elasticd_planner.spec.plan import PackedLane, Pipeline, Plan, Stage
from rich.console import Console, RenderableType

from elasticd.cli import history, jobs, logs, top, why
from elasticd.cli.status import screen
from elasticd.explain.switch_gain import Gain
from elasticd.records import HistoryRecord
from elasticd.wire.api_types import (
    ExceptionStatus,
    ExpertDeviceStatus,
    ExpertsStatus,
    ModuleDeviceStatus,
    ModuleStatus,
)
from elasticd.wire.event_record import EVENTS_OF_A_TERM as TERM
from elasticd.wire.event_record import EventRecord
from elasticd.wire.step_record import StepRecord
from tests.cli.test_status import PLAN, STATUS
from tests.planner.test_search import problem

EVENTS = (
    EventRecord(id=1, time=0.0, kind="slow", job="j", text="a/1 is slow", data={"device": "a/1"}),
    EventRecord(
        id=2,
        time=1.0,
        kind="swapped",
        job="j",
        text="b/0 runs plan 7",
        data={"number": 7, "pause_seconds": 0.5},
    ),
    EventRecord(id=3, time=2.0, kind="node_up", job="", text="node b is there", data={"node": "b"}),
)


def steps(plan: int, first: int, seconds: Iterable[float], at: float = 0.0) -> tuple[StepRecord, ...]:
    found = []
    for index, taken in enumerate(seconds):
        at += taken
        step = StepRecord(step=first + index, plan=plan, loss=1.0, tokens=10, seconds=taken, time=at)
        found.append(step)
    return tuple(found)


STEPS = (*steps(6, 30, [1.0] * 6 + [3.0] * 3), *steps(7, 39, [1.25] * 8, at=15.5))


def record(number: int, rates: dict[str, float], plan: Plan = PLAN, *, guessed: bool = False) -> HistoryRecord:
    found = problem()
    nodes = tuple(
        Node(name=node, devices=tuple(Device(name=f"{node}/{index}", memory=1 << 40) for index in range(2)))
        for node in "ab"
    )
    cluster = msgspec.structs.replace(found.cluster, nodes=nodes)
    profile = msgspec.structs.replace(found.profile, fitted=not guessed)
    made: Problem = msgspec.structs.replace(found, cluster=cluster, rates=rates, profile=profile)
    plan = msgspec.structs.replace(plan, number=number)
    return HistoryRecord(number=number, plan=plan, problem=made, reason=f"reason {number}")


def shown(*parts: RenderableType) -> str:
    screened = io.StringIO()
    Console(width=160, file=screened).print(*parts, sep="\n")
    return screened.getvalue()


#: A job of two modules, one of whose encoders is slow.
MODULES = (
    ModuleStatus(
        module="vision",
        devices=2,
        busiest="a/1",
        seconds=0.24,
        items="images",
        items_a_sample=1.5,
        rows_an_item=576.0,
        by_device=(
            ModuleDeviceStatus(
                device="a/0", seconds=0.12, items=12, share=0.75, planned_share=0.5, slowdown=1.0
            ),
            ModuleDeviceStatus(
                device="a/1", seconds=0.24, items=4, share=0.25, planned_share=0.5, slowdown=3.0
            ),
        ),
    ),
    ModuleStatus(
        module="language",
        devices=2,
        busiest="b/0",
        seconds=0.9,
        by_device=(
            ModuleDeviceStatus(device="a/1", seconds=0.3),
            ModuleDeviceStatus(device="b/0", seconds=0.9),
        ),
    ),
)


def test_top_has_the_modules_of_each_device_beside_each_other_and_names_slow_lanes() -> None:
    (job,) = STATUS.jobs
    status = msgspec.structs.replace(STATUS, jobs=(msgspec.structs.replace(job, modules=MODULES),))
    text = shown(top.drawn(status, {"j": STEPS}, EVENTS))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith(("a/", "b/"))}
    assert rows["a/1"] == ["0.240", "s", "4", "(25%)", "0.300", "s", "0.540", "s"]
    assert rows["b/0"] == ["0.900", "s", "0.900", "s"]
    assert "a/1  4 images, 25% of all rows; 50% as planned; a row takes 3.00 times the planned time" in text
    assert "a/0  12 images" not in text, "it takes the planned time"
    assert "module vision  0.240 s of computation on a/1, the busiest of 2 devices" in text


def test_why_says_what_a_device_did_for_each_module() -> None:
    (job,) = STATUS.jobs
    status = msgspec.structs.replace(STATUS, jobs=(msgspec.structs.replace(job, modules=MODULES),))
    text = shown(*why.device("a/1", "j", status, EVENTS, ()))
    assert "vision: 0.240 s of computation; 4 images, 25% of all rows; 50% as planned; a row takes 3.00" in text
    assert "language: 0.300 s of computation" in text
    told = why.device_told("a/1", "j", status, EVENTS, ())["modules"]
    assert told == {"vision": MODULES[0].by_device[1], "language": MODULES[1].by_device[0]}


def test_top_draws_devices_speed_plan_and_events() -> None:
    text = shown(top.drawn(STATUS, {"j": STEPS}, EVENTS))
    assert "3.00x" in text
    assert "█" * 18 in text
    assert "█" * 19 not in text
    assert "steps/s 1.25" in text, "steps over wall time"
    assert "node unreachable" in text
    assert "a/1 is slow" in text


def test_bars_and_sparks_keep_their_bounds() -> None:
    assert len(top.bar(1.0)) == top.WIDTH / top.FULL
    assert len(top.bar(100.0)) == len(top.bar(float("1e9"))) == top.WIDTH
    assert top.spark([]) == top.spark([0.0]) == ""
    assert top.spark([0.0, 1.0, 2.0]) == " ▄█"


def test_why_a_plan_tells_cause_prediction_and_gain() -> None:
    text = shown(*why.plan(record(7, {"a/1": 3.0}), EVENTS, STEPS))
    assert "plan 7  reason 7" in text
    assert "a/1 takes 3.00x" in text
    assert "predicted 1.250 s a step" in text
    assert "took      1.250 s a step, the median of 8 steps; 1.00 times the prediction" in text
    assert (
        "3.000 s a step before, 1.250 s after (2.40x); the switch took 0.500 s, paid back in 1 step\n" in text
    )
    assert "b/0 runs plan 7" in text
    assert "a/1 is slow" not in text


def test_what_a_step_takes_is_as_the_newest_profile_predicts_it() -> None:
    """A guess by the shapes of the model is called one, and is no measure of what was measured."""
    guess = record(7, {}, guessed=True)
    text = shown(*why.plan(guess, EVENTS, STEPS), history.listed([guess]))
    assert "predicted 1.250 s a step, a guess before steps were measured" in text
    assert "the median of 8 steps\n" in text
    assert "1.250 s ?" in text
    data = {"number": 7, "step_seconds": 1.125}
    fitted = EventRecord(id=4, time=3.0, kind="fitted", job="j", text="fitted", data=data)
    text = shown(*why.plan(guess, (*EVENTS, fitted), STEPS), history.listed([guess], [fitted]))
    assert "predicted 1.125 s a step; 1.250 s when it was made" in text
    assert "the median of 8 steps; 1.11 times the prediction" in text
    assert "1.125 s  " in text
    shifted = EventRecord(
        id=5, time=4.0, kind="shifted", job="j", text="", data={"plan": 7, "step_seconds": 1.5}
    )
    assert why.prediction_of(guess, (fitted, shifted)).seconds == 1.5
    other = EventRecord(id=6, time=4.0, kind="fitted", job="j", text="", data={**data, "number": 8})
    assert why.prediction_of(guess, (fitted, other)).seconds == 1.125


def test_why_a_plan_tells_what_its_newest_snapshot_cost() -> None:
    first, newest = (
        EventRecord(
            id=number,
            time=3.0,
            kind="snapshot",
            job="j",
            text="",
            data={"number": 7, "step": number, "bytes": 3 << 20, "seconds": seconds, "every": 1},
        )
        for number, seconds in ((4, 0.0), (5, 0.0125))
    )
    text = shown(*why.plan(record(7, {}), (*EVENTS, first), STEPS))
    assert "snapshots each step, 3 MiB of each device\n" in text
    told = (*EVENTS, newest, first)
    text = shown(*why.plan(record(7, {}), told, STEPS))
    assert (
        "snapshots each step, 3 MiB of each device; one holds training up for 0.013 s, 1.0% of a step\n" in text
    )
    assert json.loads(msgspec.json.encode(why.plan_told(record(7, {}), told, STEPS)))["snapshots"] == {
        "bytes": 3 << 20,
        "seconds": 0.0125,
        "every": 1,
    }
    assert "snapshots" not in shown(*why.plan(record(8, {}), told, STEPS)), "of another plan"
    older = msgspec.structs.replace(newest, data={"number": 7, "step": 5})
    assert "snapshots" not in shown(*why.plan(record(7, {}), (*EVENTS, older), STEPS)), "an older leader's"


def test_why_a_plan_whose_steps_are_few_claims_no_gain() -> None:
    text = shown(*why.plan(record(7, {}), (), STEPS[:11]))
    assert "every device at normal speed" in text
    assert "took" not in text
    assert "gained" not in text


def test_why_a_device_tells_rate_use_and_what_plans_counted_with() -> None:
    records = [record(5, {}), record(6, {}), record(7, {"a/1": 3.0})]
    text = shown(*why.device("a/1", "j", STATUS, EVENTS, records))
    assert "takes 3.00x the normal time; its node cannot be reached" in text
    assert "pipeline 0, layers 0-2, 2 of 8 shares, 4 micro-batches a step" in text
    stages = (
        Stage(start=0, stop=3, devices=("b/0", "a/0", "a/1"), shares=(1, 6, 2), lanes=(1, 2)),
        Stage(start=3, stop=5, devices=("b/1", "b/2"), shares=(1, 1), lanes=(1, 1)),
    )
    (job,) = STATUS.jobs
    packed = (PackedLane(capacity=4096), PackedLane(capacity=8192))
    for lanes, taken in (((), "1 micro-batch a step"), (packed, "about 1 row a step of at most 8192 tokens")):
        made = strategy((Pipeline(stages=stages, micro_batches=4, rows=(3, 1), packed=lanes),))
        plan = PLAN.replace(strategies=(made,), idle=())
        status = msgspec.structs.replace(STATUS, jobs=(msgspec.structs.replace(job, plan=plan),))
        assert f"pipeline 0, lane 1, layers 0-2, 2 of 8 shares, {taken}" in shown(
            *why.device("a/1", "j", status, EVENTS, records)
        )
    assert text.count("counted with") == 2
    assert "plan 7 counted with 3.00x" in text
    assert "a/1 is slow" in text


def test_why_tells_programs_the_same() -> None:
    told = json.loads(msgspec.json.encode(why.plan_told(record(7, {"a/1": 3.0}), EVENTS, STEPS)))
    assert told["plan"]["number"] == 7
    assert told["step_seconds"] == 1.25
    assert told["gain"] == {"before": 3.0, "after": 1.25, "pause": 0.5, "faulted": False}
    assert [event["kind"] for event in told["events"]] == ["swapped"]
    assert json.loads(msgspec.json.encode(why.plan_told(record(7, {}), (), STEPS[:9])))["gain"] is None
    records = [record(6, {}), record(7, {"a/1": 3.0})]
    told = json.loads(msgspec.json.encode(why.device_told("a/1", "j", STATUS, EVENTS, records)))
    assert told["device"]["rate"] == 3.0
    assert told["connected"] is False
    assert [(plan["number"], plan["rate"]) for plan in told["plans"]] == [(6, 1.0), (7, 3.0)]
    assert "2 of 8 shares" in told["use"]


def test_jobs_have_a_line_each() -> None:
    lines = shown(jobs.listed(STATUS)).splitlines()
    assert lines[1].split() == ["j", "running", "41", "2.5000", "1,234", "7", "3"]


def test_the_load_of_experts_is_told_and_devices_that_have_most_to_do_with_them() -> None:
    experts = ExpertsStatus(
        experts=64,
        copies=3,
        uneven=0.25,
        block=2,
        heaviest=7,
        part=0.31,
        by_device=(
            ExpertDeviceStatus(device="a/1", experts=20, work=1.2),
            ExpertDeviceStatus(device="b/0", experts=47, work=0.8),
        ),
    )
    (job,) = STATUS.jobs
    status = msgspec.structs.replace(STATUS, jobs=(msgspec.structs.replace(job, experts=experts),))
    text = shown(top.drawn(status, {"j": STEPS}, EVENTS))
    assert "64 in all blocks, and 3 on further devices; the busiest device has 25% more than the least" in text
    assert "heaviest: expert 7 of block 2, 31% of its rows" in text
    assert "a/1  20 experts, 1.20 times the work of its share" in text
    assert "47 experts" not in text
    assert "20 experts, 1.20 times the work" in shown(*why.device("a/1", "j", status, EVENTS, ()))


def test_why_an_unknown_device_names_those_there_are() -> None:
    with pytest.raises(why.CannotReach, match=r"no device 'z/9'; there are: a/1"):
        list(why.device("z/9", "j", STATUS, (), ()))


def test_why_tells_whom_a_job_waits_for() -> None:
    (job,) = STATUS.jobs
    reason = "waits for worker a/1, which is in the optimizer's factory for 12 s"
    status = msgspec.structs.replace(STATUS, jobs=(msgspec.structs.replace(job, reason=reason),))
    assert reason in shown(*why.now(reason))
    assert shown(*why.now("")).strip() == ""
    assert reason in shown(*why.device("a/1", "j", status, (), ()))
    assert why.device_told("a/1", "j", status, (), ())["reason"] == reason
    other = msgspec.structs.replace(job, reason=reason.replace("a/1", "a/11"))
    status = msgspec.structs.replace(STATUS, jobs=(other,))
    assert why.device_told("a/1", "j", status, (), ())["reason"] == "", "it is about another device"
    job = msgspec.structs.replace(job, plan=None, reason=reason)
    status = msgspec.structs.replace(STATUS, jobs=(job,))
    with pytest.raises(
        why.CannotReach, match=r"^no plan of job j is in force \(waits for worker a/1, .* 12 s\)$"
    ):
        why._meant(status, (), "j", None)
    with pytest.raises(why.CannotReach, match="'elasticd why j 3' has its last proposal"):
        why._meant(status, (record(3, {}),), "j", None)


def test_an_exception_of_the_script_is_told_with_its_traceback() -> None:
    trace = 'Traceback (most recent call last):\n  File "train.py", line 7, in loss\nValueError: bad\n'
    raised = ExceptionStatus(device="a/1", step=41, kind="ValueError", message="bad", traceback=trace)
    (job,) = STATUS.jobs
    status = msgspec.structs.replace(STATUS, jobs=(msgspec.structs.replace(job, exception=raised),))
    data = {"plan": 7, "device": "a/1", "traceback": trace}
    event = EventRecord(id=9, time=0.0, kind="raised", job="j", text="the script's code raised", data=data)
    line = 'File "train.py", line 7, in loss'
    for text in (
        shown(screen(status, {})),
        shown(*why.exception(raised)),
        shown(*why.plan(record(7, {}), (event,), STEPS)),
        shown(*why.device("a/1", "j", STATUS, (event,), ())),
    ):
        assert line in text
    assert "raised ValueError in step 41 on a/1: bad" in shown(screen(status, {}))
    assert line not in shown(*why.plan(record(6, {}), (event,), STEPS))
    assert "raised" not in shown(screen(STATUS, {}))


def test_history_has_a_line_for_each_plan() -> None:
    text = shown(history.listed([record(6, {}), record(7, {})]))
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["6", "7"]
    assert "1.250 s" in text
    assert "reason 7" in text


def test_a_log_line_has_kind_job_and_text() -> None:
    assert logs.line(EVENTS[0]).split(maxsplit=1)[1] == "slow            j: a/1 is slow"
    assert logs.line(EVENTS[2]).endswith("node_up         node b is there")


class Over(Exception):
    """No more answers."""


class Leaders:
    """What `logs -f` finds, one answer to each look at the events; None: nobody answers."""

    def __init__(self, *answers: tuple[int, ...] | None) -> None:
        self.answers = list(answers)

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        yield self

    def events(self, after: int = 0) -> list[EventRecord]:
        if not self.answers:
            raise Over
        found = self.answers.pop(0)
        if found is None:
            raise logs.CannotReach("nobody leads")
        event = EVENTS[0]
        return [msgspec.structs.replace(event, id=number) for number in found if number > after]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (((1, 2), (1, 2), (1, 2, 3)), [2, 3]),
        (((1, 2), (1, 2), None, None, (2, 9), (2, 9)), [2, 9]),
        (((TERM,), (TERM,), None, (1, 2), (1, 2)), [TERM, 1, 2]),
        (((1, TERM + 5), (TERM, TERM + 5), None, (TERM,), (), (TERM, 2 * TERM)), [TERM, TERM + 5, 2 * TERM]),
    ],
    ids=["one leader", "another", "one whose ids begin anew", "one that lacks the last event"],
)
def test_logs_follow_from_leader_to_leader(
    answers: tuple[Any, ...],
    told: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: None)
    events = logs.following(Leaders(*answers), 1)
    assert [next(events).id for _ in told] == told
    with pytest.raises(Over):
        next(events)
    said = "elasticd: nobody leads; waiting for a leader\n"
    assert capsys.readouterr().err == (said if None in answers else "")


def test_a_gain_that_was_told_outlives_the_steps() -> None:
    data = {"number": 7, "before": 4.0, "after": 2.0, "pause": 1.0}
    gained = EventRecord(id=9, time=1.0, kind="gained", job="j", text="", data=data)
    told = why.plan_told(record(7, {}), (*EVENTS, gained), ())
    assert told["gain"] == Gain(before=4.0, after=2.0, pause=1.0)
    text = shown(*why.plan(record(7, {}), (gained,), ()))
    assert "gained    4.000 s a step before, 2.000 s after (2.00x)" in text


def test_kinds_of_slowness_are_told_in_why_and_status() -> None:
    (node,) = STATUS.nodes
    (found,) = node.devices
    often = "slow about every 30 steps, 5 times so far"
    periodic = Slowness(kind=SlownessKind.PERIODIC, reason=often, period=30)
    once = Slowness(kind=SlownessKind.TRANSIENT, reason="a single slow step, 12")

    def told(slowness: Slowness, rate: float) -> tuple[str, str]:
        known = msgspec.structs.replace(found, slowness=slowness, rate=rate)
        status = msgspec.structs.replace(STATUS, nodes=(msgspec.structs.replace(node, devices=(known,)),))
        return shown(*why.device("a/1", "j", status, EVENTS, ())), shown(screen(status, {}))

    for text in told(periodic, 1.0):
        assert f"periodic: {often}" in text
    because, at_a_glance = told(once, 1.0)
    assert "transient: a single slow step, 12" in because
    assert "transient" not in at_a_glance, "a device that is well is not made to look ill"
    assert "transient" in told(once, 1.3)[1]
