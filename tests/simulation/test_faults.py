"""Deaths, returns, cut nodes and longer samples: the real machines meet them, and totals say what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from elasticd.simulator.faults import Fault
from elasticd.simulator.record import Happening, Outcome
from elasticd.simulator.run import simulate
from elasticd.simulator.scenario import Scenario, Times, parse
from tests.simulation.checks import check_history, kinds, mean, total
from tests.simulation.scenes import SMALL

#: Four nodes, so that one may be missing.
WIDE = SMALL.replace("nodes = 2", "nodes = 4").replace("global_batch = 8", "global_batch = 16")

RESTART = 21.0  # seconds, and a checkpoint every 50 steps
PATIENCE = Times().patience


def scene(*faults: Fault, steps: int = 90, **changes: object) -> Scenario:
    return msgspec.structs.replace(parse(WIDE, "wide.toml"), faults=faults, steps=steps, **changes)


def first(outcome: Outcome, kind: str) -> Happening:
    return next(event for event in outcome.timeline if event.kind == kind)


@pytest.fixture(scope="module")
def killed() -> Outcome:
    return simulate(scene(Fault(kind="kill", device="n2/1", step=60)))


def test_a_dead_device_stops_the_job_and_it_is_started_again_on_the_other_nodes(killed: Outcome) -> None:
    check_history(killed)
    assert killed.stopped == ""
    assert kinds(killed)[-1] == "finished"
    assert "n2/1 is dead" in first(killed, "stopped").text, "the coordinator's own word"
    again = first(killed, "restart")
    assert again.seconds - first(killed, "stopped").seconds == pytest.approx(RESTART)
    assert (again.data["nodes"], again.step, again.data["lost"]) == (3, 50, 10)
    gathered = [event.data["nodes"] for event in killed.timeline if event.kind == "job_gathered"]
    assert gathered == [["n0", "n1", "n2", "n3"], ["n0", "n1", "n3"]]


def test_what_a_death_cost_is_in_the_totals_of_all_that_train(killed: Outcome) -> None:
    for name in ("elasticd", "no reaction", "restart without the slow nodes"):
        run = total(killed, name)
        assert (run.restarts, run.lost_steps, run.steps) == (1, 10, 90)
        assert RESTART <= run.down_seconds <= RESTART + 5
    bound = total(killed, "bound")
    assert (bound.restarts, bound.lost_steps) == (0, 0)
    with_all, without = killed.stretches[0].bound, killed.stretches[-1].bound
    assert without == pytest.approx(with_all * 8 / 7, rel=0.1), "seven of eight devices live"
    assert mean(killed, 1, after=70) > without


def test_a_dead_machine_is_noticed_when_a_collective_has_waited_long_enough() -> None:
    outcome = simulate(scene(Fault(kind="kill", node="n2", step=60)))
    check_history(outcome)
    died, stopped = first(outcome, "fault"), first(outcome, "stopped")
    assert stopped.seconds - died.seconds == pytest.approx(PATIENCE, abs=1)
    assert "no word from n2" in stopped.text
    assert "cannot be reached" in first(outcome, "node_down").text
    assert kinds(outcome)[-1] == "finished"
    assert total(outcome, "elasticd").down_seconds > PATIENCE
    assert total(outcome, "no reaction").down_seconds > PATIENCE


def test_a_node_that_comes_back_may_not_join_and_is_used_by_the_next_start() -> None:
    faults = (
        Fault(kind="kill", device="n2/1", step=55),
        Fault(kind="join", device="n2/1", step=60),
        Fault(kind="kill", device="n0/0", step=75),
    )
    outcome = simulate(scene(*faults))
    check_history(outcome)
    assert "joining a running job is not supported yet" in first(outcome, "turned_away").text
    gathered = [event.data["nodes"] for event in outcome.timeline if event.kind == "job_gathered"]
    assert gathered == [["n0", "n1", "n2", "n3"], ["n0", "n1", "n3"], ["n1", "n2", "n3"]]
    assert total(outcome, "elasticd").restarts == 2


def test_a_node_that_was_never_there_joins_the_cluster() -> None:
    faults = (Fault(kind="kill", node="n3", step=0), Fault(kind="join", node="n3", step=30))
    outcome = simulate(scene(*faults))
    check_history(outcome)
    assert first(outcome, "job_gathered").data["nodes"] == ["n0", "n1", "n2"]
    assert first(outcome, "turned_away").data["node"] == "n3"
    bounds = [stretch.bound for stretch in outcome.stretches]
    assert bounds[0] > bounds[-1], "with more devices a plan could be faster"
    assert total(outcome, "elasticd").restarts == 0


def test_a_job_without_nodes_waits_until_some_are_there() -> None:
    faults = (
        *(Fault(kind="kill", device=f"n{n}/0", seconds=20.0) for n in range(4)),
        Fault(kind="join", node="n1", seconds=300.0),
        Fault(kind="join", node="n2", seconds=310.0),
    )
    outcome = simulate(scene(*faults))
    check_history(outcome)
    again = first(outcome, "restart")
    assert again.seconds == pytest.approx(300 + RESTART)
    assert again.data["nodes"] == 2
    assert kinds(outcome)[-1] == "finished"


def test_a_job_whose_nodes_never_come_back_ends_there() -> None:
    faults = tuple(Fault(kind="kill", device=f"n{n}/0", seconds=20.0) for n in range(4))
    outcome = simulate(scene(*faults))
    assert "is dead" in outcome.stopped
    still = total(outcome, "no reaction")
    assert still.steps == 0, "all since the last checkpoint is lost"
    assert total(outcome, "elasticd").lost_steps == 0, "nothing was started again"
    assert "it waits for them" in still.note


def test_a_short_cut_costs_its_seconds_and_no_restart() -> None:
    calm, cut = simulate(scene()), simulate(scene(Fault(kind="partition", node="n1", lasts=30.0, step=60)))
    check_history(cut)
    assert {"node_down", "healed"} <= set(kinds(cut))
    ours = total(cut, "elasticd")
    assert (ours.restarts, ours.lost_steps) == (0, 0)
    assert ours.seconds - total(calm, "elasticd").seconds == pytest.approx(30, abs=2)
    stood = max(stretch.step_seconds for stretch in cut.stretches)
    assert stood > 30, "the step that waited took as long"
    still = total(cut, "no reaction").seconds - total(calm, "no reaction").seconds
    assert still == pytest.approx(30, abs=1e-6)


def test_a_long_cut_ends_in_a_start_without_the_node_which_finds_out_when_it_is_back() -> None:
    fault = Fault(kind="partition", node="n1", lasts=PATIENCE + 200, step=60)
    outcome = simulate(scene(fault, steps=400))
    check_history(outcome)
    assert "no word from n1" in first(outcome, "stopped").text
    gathered = [event.data["nodes"] for event in outcome.timeline if event.kind == "job_gathered"]
    assert gathered[1] == ["n0", "n2", "n3"]
    assert kinds(outcome)[-1] == "finished"
    assert first(outcome, "healed").seconds > first(outcome, "restart").seconds


def test_longer_samples_take_longer_and_nobody_is_called_slow_for_it() -> None:
    roomy = parse(WIDE.replace("400 MiB", "4 GiB"), "wide.toml")
    fault = Fault(kind="shift", tokens=2048, step=60)
    outcome = simulate(msgspec.structs.replace(roomy, faults=(fault,)))
    check_history(outcome)
    assert "slow" not in kinds(outcome)
    before, after = outcome.stretches[0], outcome.stretches[-1]
    assert (before.tokens, after.tokens) == (16 * 1024, 16 * 2048)
    assert after.step_seconds > 1.9 * before.step_seconds
    assert after.bound > 1.9 * before.bound
    ours = total(outcome, "elasticd")
    expected = (60 * before.tokens + 30 * after.tokens) / ours.seconds
    assert ours.tokens_per_second == pytest.approx(expected, rel=1e-6)


def test_samples_that_do_not_fit_any_more_kill_a_worker_and_the_next_plan_knows_their_length() -> None:
    fault = Fault(kind="shift", tokens=4096, step=60)
    outcome = simulate(scene(fault))
    check_history(outcome)
    assert "is out of memory" in first(outcome, "stopped").text
    assert total(outcome, "elasticd").restarts == 1
    assert kinds(outcome)[-1] == "finished"


@pytest.mark.parametrize("step", [0, 1, 5, 31, 33, 34, 35, 36])
def test_a_death_at_any_moment_of_a_switch_is_survived(step: int) -> None:
    faults = (
        Fault(kind="slow", device="n0/1", factor=3.0, step=30),
        Fault(kind="kill", device="n3/0", step=max(step, 1)),
        Fault(kind="takeover", step=step),
    )
    outcome = simulate(scene(*faults))
    check_history(outcome)
    assert kinds(outcome)[-1] == "finished"
    assert total(outcome, "elasticd").restarts == 1


def test_a_day_of_all_faults_is_the_same_in_every_process(tmp_path: Path) -> None:
    text = WIDE.replace("steps = 90", "hours = 6.0") + (
        "[random]\nslow_per_device_day = 4.0\nstop_per_device_day = 3.0\nrepair_hours = 0.5\n"
        '[[fault]]\nkind = "partition"\nnode = "n1"\nlasts = 700.0\nseconds = 900.0\n'
        '[[fault]]\nkind = "shift"\ntokens = 1536\nseconds = 5000.0\n'
    )
    path = tmp_path / "wide.toml"
    path.write_text(text)
    here = simulate(parse(text, str(path)))
    check_history(here)
    assert {"slow", "restart", "healed", "turned_away"} <= set(kinds(here))
    assert len({run.seconds for run in here.totals}) == 1
    command = (sys.executable, "-m", "elasticd", "simulate", str(path), "--json")
    env = {**os.environ, "PYTHONHASHSEED": "5"}
    done = subprocess.run(command, capture_output=True, env=env, timeout=120, check=True)
    assert done.stdout.strip() == here.to_json().strip()
