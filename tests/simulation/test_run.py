"""Whole scenarios: the machines detect, plan and switch; the same seed gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from math import log2
from pathlib import Path

import msgspec
import pytest
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.policy.stability import FREE, first_wait

from elasticd.chaos.faults import Fault
from elasticd.codec.decoding import decode_stored
from elasticd.simulator.results.result import Outcome
from elasticd.simulator.run import simulate
from elasticd.simulator.scenarios.scenario import parse
from tests.simulation.checks import check_history, kinds, mean, scenario, total
from tests.simulation.scenes import SLOW, SMALL


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(scenario())


def test_a_slow_device_is_detected_replanned_around_and_given_its_work_back(outcome: Outcome) -> None:
    check_history(outcome)
    assert outcome.stopped == ""
    told = {(event.kind, event.step) for event in outcome.timeline if event.kind in ("slow", "recovered")}
    assert told == {("slow", 33), ("recovered", 63)}, "after the three steps that move a median of five"
    assert total(outcome, "elasticd").switches == 2
    assert outcome.timeline[-1].kind == "finished"
    healthy, slowed = mean(outcome, 1, before=30), mean(outcome, 2)
    hit = [s for s in outcome.stretches if s.plan == 1 and s.first_step >= 30]
    assert hit[0].step_seconds > 2 * healthy
    assert slowed < 0.6 * hit[0].step_seconds
    assert mean(outcome, 3, after=70) == pytest.approx(healthy, rel=0.02)


def test_throughput_after_a_switch_is_what_the_planner_predicted(outcome: Outcome) -> None:
    predicted = {e.data["number"]: e.data["step_seconds"] for e in outcome.timeline if e.kind == "proposed"}
    assert mean(outcome, 2) == pytest.approx(predicted[2], rel=0.04)
    assert mean(outcome, 3, after=70) == pytest.approx(predicted[3], rel=0.04)


def test_elasticd_lies_between_no_reaction_and_the_bound(outcome: Outcome) -> None:
    ours, still = total(outcome, "elasticd"), total(outcome, "no reaction")
    assert still.tokens_per_second < ours.tokens_per_second < total(outcome, "bound").tokens_per_second
    assert ours.pause_seconds > 0
    assert ours.bytes_moved > 0
    assert ours.planning_seconds > 0
    restart = total(outcome, "restart without the slow nodes")
    assert restart.note.startswith("the model does not fit without n0"), "one node's memory is too small"


def test_where_it_fits_the_baseline_restarts_and_pays_for_it() -> None:
    text = (SMALL + SLOW).replace("736 MiB", "1 GiB").replace("step = 60", "step = 580")
    outcome = simulate(scenario(text, steps=600))
    restart = total(outcome, "restart without the slow nodes")
    assert restart.switches >= 1
    assert restart.pause_seconds == restart.switches * 21.0
    assert restart.lost_steps >= 33, "slow from step 30, noticed three steps later, no checkpoint before"
    assert restart.note == ""
    assert total(outcome, "elasticd").tokens_per_second > restart.tokens_per_second


def test_the_same_seed_gives_the_same_bytes_in_another_process(outcome: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL + SLOW)
    command = (sys.executable, "-m", "elasticd", "simulate", str(path), "--json")
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(command, capture_output=True, env=env, timeout=300, check=True)
    assert done.stdout.strip() == outcome.to_json().strip()
    assert decode_stored(done.stdout, Outcome) == outcome


def test_another_seed_gives_another_timeline_and_the_same_story(outcome: Outcome) -> None:
    other = simulate(scenario(seed=4))
    assert other.to_json() != outcome.to_json()
    assert kinds(other) == kinds(outcome)


def test_steps_that_are_counted_take_as_long_as_steps_that_are_played(outcome: Outcome) -> None:
    played = simulate(scenario(settle=None))
    check_history(played)
    assert all(stretch.steps == 1 for stretch in played.stretches)
    assert len(outcome.stretches) < len(played.stretches)
    assert kinds(played) == kinds(outcome)
    assert total(played, "elasticd").seconds == pytest.approx(total(outcome, "elasticd").seconds, rel=0.01)


def test_faults_at_times_strike_at_those_times_also_in_the_baselines() -> None:
    text = SMALL.replace("steps = 90", "hours = 0.05") + SLOW.replace("step = 30", "seconds = 60").replace(
        "step = 60", "seconds = 120"
    )
    outcome = simulate(scenario(text))
    check_history(outcome)
    assert [e.seconds for e in outcome.timeline if e.kind == "fault"] == [60.0, 120.0]
    assert {run.seconds for run in outcome.totals} == {180.0}
    assert total(outcome, "no reaction").steps < total(outcome, "elasticd").steps


def test_a_whole_slow_node_is_replanned_around() -> None:
    text = (SMALL + SLOW).replace('device = "n0/1"', 'node = "n0"')
    outcome = simulate(scenario(text))
    check_history(outcome)
    assert {e.data["device"] for e in outcome.timeline if e.kind == "slow"} == {"n0/0", "n0/1"}
    assert total(outcome, "elasticd").switches >= 2


@pytest.mark.parametrize("step", [5, 20, 31, 33, 34, 35, 45])
def test_a_leader_that_dies_at_any_moment_is_followed_and_the_story_goes_on(step: int) -> None:
    given = scenario()
    outcome = simulate(
        msgspec.structs.replace(given, faults=(*given.faults, Fault(kind="takeover", step=step)))
    )
    check_history(outcome)
    assert "takeover" in kinds(outcome)
    assert kinds(outcome)[-1] == "finished"
    assert outcome.stopped == ""
    assert total(outcome, "elasticd").switches >= 2


def test_a_node_without_its_leader_trains_on_and_is_not_replanned_before_it_is_back() -> None:
    given = scenario()
    cut = (Fault(kind="cut", node="n1", step=25), Fault(kind="heal", node="n1", step=45))
    outcome = simulate(msgspec.structs.replace(given, faults=(*given.faults, *cut)))
    check_history(outcome)
    assert kinds(outcome)[-1] == "finished"
    assert {s.plan for s in outcome.stretches if s.first_step < 45} == {1}
    told = [event.step for event in outcome.timeline if event.kind == "slow"]
    assert told == [45], "the agent kept what it could not report"
    assert total(outcome, "elasticd").switches == 2


def test_a_proposal_is_given_up_when_a_node_loses_the_leader_before_it_is_prepared() -> None:
    given = scenario()
    times = msgspec.structs.replace(given.times, prepare=20.0)
    cut = (Fault(kind="cut", node="n1", step=35), Fault(kind="heal", node="n1", step=42))
    outcome = simulate(msgspec.structs.replace(given, times=times, faults=(*given.faults, *cut)))
    check_history(outcome)
    assert "aborted" in kinds(outcome)
    assert kinds(outcome)[-1] == "finished"
    assert max(s.plan for s in outcome.stretches) > 2, "the next one has a number of its own"


def changing(number: int, step: int) -> Fault:
    """n0/1 becomes slow and recovers by turns."""
    if number % 2:
        return Fault(kind="recover", device="n0/1", step=step)
    return Fault(kind="slow", device="n0/1", factor=2.0, step=step)


@pytest.mark.parametrize("period", [8, 30])
def test_a_device_that_oscillates_causes_a_bounded_number_of_switches(period: int) -> None:
    faults = tuple(changing(i, 20 + period * i) for i in range(24))
    steps = 20 + period * len(faults)
    outcome = simulate(scenario(steps=steps, faults=faults))
    check_history(outcome)
    ours, still = total(outcome, "elasticd"), total(outcome, "no reaction")
    changes = [event for event in outcome.timeline if event.kind in ("slow", "recovered")]
    assert len(changes) > 20, "each was seen"
    wait = first_wait(PolicySettings().horizon_steps)
    assert 3 <= ours.switches <= min(FREE + 1 + 2 * log2(steps / (2 * wait) + 1), len(changes) / 2)
    assert ours.tokens_per_second > 0.97 * still.tokens_per_second
    stays = [event.text for event in outcome.timeline if event.kind == "kept_plan"]
    assert any(
        "n0/1 has changed its speed" in text and "a switch pays once this lasts" in text for text in stays
    )


def test_an_oscillation_that_ends_is_answered_once_the_condition_has_lasted() -> None:
    faults = tuple(changing(i, 20 + 8 * i) for i in range(8))
    outcome = simulate(scenario(steps=400, faults=faults))
    check_history(outcome)
    last = [event for event in outcome.timeline if event.kind == "recorded"][-1]
    assert 76 + first_wait(PolicySettings().horizon_steps) <= last.step <= 76 + 40
    asked = [
        event.step for event in outcome.timeline if event.kind == "planning" and 84 < event.step < last.step
    ]
    assert asked == [], "the answer that was kept is enough"
    assert mean(outcome, outcome.stretches[-1].plan, after=last.step + 5) == pytest.approx(
        mean(outcome, 1, before=20), rel=0.02
    )


def test_a_model_that_does_not_fit_stops_the_job_and_says_what_is_missing() -> None:
    outcome = simulate(scenario(SMALL.replace("736 MiB", "40 MiB")))
    assert "there is no plan for this job" in outcome.stopped
    assert "stopped" in kinds(outcome)
    assert outcome.stretches == ()


@pytest.mark.full
@pytest.mark.timeout(3600)  # the planner takes most of three minutes of processor
def test_a_cluster_beyond_enumeration_walks_through_a_straggler_and_a_slow_node() -> None:
    walk = """
seed = 5
steps = 110
[cluster]
nodes = 4
devices = 4
memory = "736 MiB"
flops = 1e12
assumed = 1.3e12
inside = {bandwidth = 2e10, latency = 1e-5}
between = {bandwidth = 5e9, latency = 2e-5}
[model]
layers = 24
width = 512
heads = 8
kv_heads = 4
hidden = 1408
tokens = 1024
global_batch = 32
[[fault]]
kind = "slow"
device = "n0/1"
factor = 4.0
step = 30
[[fault]]
kind = "slow"
node = "n2"
factor = 2.0
step = 60
[[fault]]
kind = "recover"
device = "n0/1"
step = 90
"""
    outcome = simulate(parse(walk, "walk.toml"))
    check_history(outcome)
    assert kinds(outcome)[-1] == "finished"
    slow = {e.data["device"] for e in outcome.timeline if e.kind == "slow"}
    assert slow >= {"n0/1", "n2/0", "n2/1", "n2/2", "n2/3"}
    ours, still = total(outcome, "elasticd"), total(outcome, "no reaction")
    assert ours.switches >= 2
    assert ours.tokens_per_second > 1.2 * still.tokens_per_second
    assert simulate(parse(walk, "walk.toml")).to_json() == outcome.to_json()
