"""The report: figures as the record has them, and each check fails on the record that breaks it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from elasticd_planner.problem import without
from elasticd_planner.search.planner import plan
from rich.console import Console

from elasticd.demo.record import DemoLine, DemoRecord, read_ledger
from elasticd.demo.report import report, samples_check, unequal, work
from elasticd.demo.scenario import DemoError
from elasticd.demo.show import show
from elasticd.wire.event_record import Pacing
from tests.demo.records import PIDS, SCENARIO, TOKENS, changed, history, record, seconds_of

GOOD = record()


def failed(made: DemoRecord) -> list[str]:
    return [check.name for check in report(made).failed]


def test_good_run_meets_every_check() -> None:
    assert failed(GOOD) == []


def test_throughput_is_that_of_each_phase() -> None:
    healthy, slowed, after, recovered = report(GOOD).speeds
    made = history()
    assert healthy.measured == pytest.approx(TOKENS / seconds_of(made[0].plan))
    assert slowed.measured == pytest.approx(healthy.measured / 3)
    assert after.measured == after.predicted == pytest.approx(TOKENS / seconds_of(made[1].plan))
    assert recovered.measured == pytest.approx(healthy.measured)
    assert (healthy.steps, slowed.steps, after.steps) == (18, 5, 18)
    assert slowed.predicted is None


def test_best_plan_without_the_slow_device_is_the_planners() -> None:
    problem = msgspec.structs.replace(without(history()[1].problem, SCENARIO.slow_device), current=None)
    best = plan(problem).plan
    assert best is not None
    assert report(GOOD).without_slow == pytest.approx(TOKENS / seconds_of(best))


def test_ideal_is_the_healthy_speed_over_the_harmonic_ratio() -> None:
    made = report(GOOD)
    assert made.ideal == pytest.approx(made.speeds[0].measured / 1.2)


def test_switches_count_from_the_intervention_and_over_all_ranks() -> None:
    slow, back = report(GOOD).switches
    step = seconds_of(history()[0].plan)
    assert slow.detected_seconds == pytest.approx(12 * step)
    assert slow.switched_seconds == pytest.approx(15 * step)
    assert slow.pause_seconds == pytest.approx(0.113)
    assert slow.pause_steps == pytest.approx(0.113 / seconds_of(history()[1].plan))
    assert (slow.bytes_wire, slow.bytes_lacking, slow.bytes_state) == (300, 300, 1 << 20)
    assert back.number == 3


def test_work_adds_up_over_the_devices_of_a_plan() -> None:
    made = history()[1].plan
    assert sum(work(made, device) for device in made.members) == pytest.approx(1.0)
    assert work(made, SCENARIO.slow_device) < 0.25
    assert unequal(made)


def test_slower_than_predicted_fails() -> None:
    assert "as predicted" in failed(record(after=1.1))
    assert "as predicted" not in failed(record(after=1.05))


def test_slower_than_without_the_device_fails() -> None:
    best = report(GOOD).without_slow
    assert best is not None
    assert "better than without" in failed(record(after=1.01 * report(GOOD).speeds[2].measured / best))


def test_overruns_of_the_emulation_fail() -> None:
    assert failed(changed(GOOD, pacing=Pacing(paced=100, overruns=2))) == ["emulation in time"]
    assert failed(changed(GOOD, pacing=Pacing())) == ["emulation in time"]


def test_another_process_fails() -> None:
    assert failed(changed(GOOD, after={**PIDS, "beta/1": 99})) == ["same processes"]
    assert failed(changed(GOOD, before={}, after={})) == ["same processes"]


def test_another_loss_fails() -> None:
    off = (*GOOD.ledger[:-1], msgspec.structs.replace(GOOD.ledger[-1], loss=2.51))
    assert failed(changed(GOOD, ledger=off)) == ["same loss"]


def test_bytes_beyond_those_lacking_fail() -> None:
    events = [msgspec.structs.replace(event, data={**event.data, "bytes_lacking": 0}) for event in GOOD.events]
    assert failed(changed(GOOD, events=tuple(events))) == ["nothing moved twice"]


def test_plan_that_gives_no_work_back_fails() -> None:
    stuck = (*GOOD.history[:2], msgspec.structs.replace(GOOD.history[1], number=3))
    assert "work given back" in failed(changed(GOOD, history=stuck))


def test_plan_that_leaves_the_slow_device_an_equal_part_fails() -> None:
    assert work(history()[0].plan, SCENARIO.slow_device) == pytest.approx(0.25)
    same = (GOOD.history[0], msgspec.structs.replace(GOOD.history[0], number=2), *GOOD.history[2:])
    assert "unequal work" in failed(changed(GOOD, history=same))


@pytest.mark.parametrize("kind", ["chaos", "slow", "swapped"])
def test_record_without_an_event_of_the_story_is_refused(kind: str) -> None:
    events = tuple(event for event in GOOD.events if event.kind != kind)
    with pytest.raises(DemoError, match="the record of the run"):
        report(changed(GOOD, events=events))


def lines(*samples: tuple[int, ...]) -> list[DemoLine]:
    return [DemoLine(step=index, loss=1.0, samples=drawn) for index, drawn in enumerate(samples)]


def test_samples_are_checked_against_the_reference() -> None:
    good = lines((1, 2), (3, 4))
    assert samples_check(good, good, 2).met
    assert not samples_check(good[:1], good, 2).met  # a step is missing
    assert not samples_check([good[0], good[0]], good, 2).met  # a step came twice
    assert not samples_check(good, lines((1, 2), (3, 5)), 2).met  # other samples
    assert not samples_check(good, good[:1], 2).met  # the reference ended early
    twice = lines((1, 2), (2, 3))
    assert not samples_check(twice, twice, 2).met  # a sample came twice


def test_ledger_is_read_as_it_was_written_and_refused_when_it_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"step": 0, "loss": 1.5, "samples": [4, 2], "device": "alpha/0"}\n')
    assert read_ledger(path) == (DemoLine(step=0, loss=1.5, samples=(4, 2)),)
    path.write_text("{")
    with pytest.raises(DemoError, match="cannot be read"):
        read_ledger(path)


def test_show_writes_report_and_plot_and_gives_the_exit_code(tmp_path: Path) -> None:
    said = io.StringIO()
    console = Console(file=said, width=120)
    assert show(GOOD, tmp_path, console) == 0
    assert "its devices is emulated" in said.getvalue()
    assert "all of it holds" in said.getvalue()
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["emulated"] is True
    assert all(check["met"] for check in written["checks"])
    assert show(changed(GOOD, pacing=Pacing()), tmp_path, console) == 1
    assert "the demo failed: emulation in time" in said.getvalue()
