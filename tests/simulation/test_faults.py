"""Deaths, joins, cut nodes and longer samples: the real machines meet them, and totals say what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from elasticd_planner.problem import Answer, Problem

from elasticd.chaos.faults import Fault
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.simulator.planning import Planner
from elasticd.simulator.results.result import Happening, Outcome
from elasticd.simulator.run import Simulation, simulate
from elasticd.simulator.scenarios.scenario import Scenario, Times, parse
from tests import sizes
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


def test_a_dead_device_costs_a_pause_and_the_job_goes_on_from_the_same_step(killed: Outcome) -> None:
    check_history(killed)
    assert killed.stopped == ""
    assert not {"stopped", "restart", "waiting"} & {*kinds(killed)}
    assert kinds(killed)[-1] == "finished"
    assert "n2/1 is dead" in first(killed, "fenced").text, "the coordinator's own word"
    died, resumed = first(killed, "fault"), first(killed, "resumed")
    assert (died.step, resumed.step) == (60, 60), "no step that was made is lost"
    last = [stretch for stretch in killed.stretches if stretch.stop <= died.seconds][-1]
    assert resumed.data["seconds"] == pytest.approx(resumed.seconds - last.stop, abs=1e-5)
    after = next(stretch for stretch in killed.stretches if stretch.start >= resumed.seconds - 1e-5)
    assert (after.first_step, after.start_number) == (60, 1), "the step under way is made again"
    assert after.plan == resumed.data["number"]


def test_what_a_death_cost_is_in_the_totals_of_all_that_train(killed: Outcome) -> None:
    ours, times = total(killed, "elasticd"), Times()
    assert (ours.recoveries, ours.restarts, ours.lost_steps, ours.steps) == (1, 0, 0, 90)
    assert (ours.down_seconds, ours.switches, ours.pause_seconds) == (0, 0, 0)
    assert times.prepare + times.pause < ours.recovery_seconds < times.prepare + times.pause + 1
    assert ours.bytes_moved > 0
    for name in ("no reaction", "restart without the slow nodes"):
        run = total(killed, name)
        assert (run.restarts, run.lost_steps, run.steps, run.recoveries) == (1, 10, 90, 0)
        assert RESTART <= run.down_seconds <= RESTART + 5
        assert run.seconds > ours.seconds + RESTART
    bound = total(killed, "bound")
    assert (bound.restarts, bound.lost_steps) == (0, 0)
    with_all, without = killed.stretches[0].bound, killed.stretches[-1].bound
    assert without == pytest.approx(with_all * 8 / 7, rel=0.1), "seven of eight devices live"
    assert mean(killed, killed.stretches[-1].plan) > without


def test_a_dead_machine_is_fenced_off_once_the_steps_have_stopped() -> None:
    outcome = simulate(scene(Fault(kind="kill", node="n2", step=60)))
    check_history(outcome)
    died, fenced = first(outcome, "fault"), first(outcome, "fenced")
    step = mean(outcome, 1, after=12)
    least = JobSettings().node_seconds + 2 * step
    assert least < fenced.seconds - died.seconds < least + 1, "long before a collective gives up"
    assert "n2 cannot be reached" in fenced.text
    assert fenced.data["gone"] == ["n2/0", "n2/1"]
    assert "cannot be reached" in first(outcome, "node_down").text
    assert kinds(outcome)[-1] == "finished"
    assert total(outcome, "elasticd").down_seconds == 0
    assert total(outcome, "no reaction").down_seconds > PATIENCE


def test_a_repaired_node_joins_the_running_job_and_the_next_plan_uses_it() -> None:
    faults = (
        Fault(kind="kill", device="n2/1", step=55),
        Fault(kind="join", device="n2/1", step=60),
        Fault(kind="kill", device="n0/0", step=75),
    )
    outcome = simulate(scene(*faults))
    check_history(outcome)
    assert first(outcome, "joined").data["node"] == "n2"
    plans = [event.step for event in outcome.timeline if event.kind == "recorded"]
    assert plans[:2] == [0, 55]
    assert 60 < plans[2] < 70, "the node is used"
    assert plans[3:] == [75]
    ours = total(outcome, "elasticd")
    assert (ours.recoveries, ours.switches, ours.restarts) == (2, 1, 0)
    used = outcome.stretches[0].plan, mean(outcome, 1, after=12, before=55)
    again = next(s.plan for s in outcome.stretches if s.first_step == 72)
    assert mean(outcome, again, before=75) == pytest.approx(used[1], rel=0.02), "as fast as before the death"


def test_a_join_costs_no_more_pause_than_any_switch() -> None:
    """Those who stand by wait for the members' vote; the members do not wait for them."""
    faults = (Fault(kind="kill", device="n2/1", step=55), Fault(kind="join", device="n2/1", step=60))
    ours = total(simulate(scene(*faults)), "elasticd")
    assert ours.switches == 1
    assert Times().pause < ours.pause_seconds < Times().pause + 0.2


def test_a_node_that_was_never_there_joins_the_job() -> None:
    faults = (Fault(kind="kill", node="n3", step=0), Fault(kind="join", node="n3", step=30))
    outcome = simulate(scene(*faults))
    check_history(outcome)
    assert first(outcome, "job_gathered").data["nodes"] == ["n0", "n1", "n2"]
    assert first(outcome, "joined").data["node"] == "n3"
    ours = total(outcome, "elasticd")
    assert (ours.restarts, ours.recoveries, ours.switches) == (0, 0, 1)
    bounds = [stretch.bound for stretch in outcome.stretches]
    assert bounds[0] > bounds[-1], "with more devices a plan can be faster"
    assert mean(outcome, 2) < 0.8 * mean(outcome, 1, before=30), "and is"


def test_a_job_that_lost_state_stops_and_is_started_again_from_its_checkpoint() -> None:
    """Both copies of a part of the model die at once."""
    faults = tuple(Fault(kind="kill", device=device, step=60) for device in ("n0/0", "n2/0"))
    outcome = simulate(scene(*faults))
    check_history(outcome)
    assert "state is lost" in first(outcome, "stopped").text
    again = first(outcome, "restart")
    assert again.seconds - first(outcome, "stopped").seconds == pytest.approx(RESTART)
    assert (again.data["nodes"], again.step, again.data["lost"]) == (2, 50, 10)
    gathered = [event.data["nodes"] for event in outcome.timeline if event.kind == "job_gathered"]
    assert gathered == [["n0", "n1", "n2", "n3"], ["n1", "n3"]]
    ours = total(outcome, "elasticd")
    assert (ours.restarts, ours.recoveries, ours.lost_steps) == (1, 0, 10)
    assert ours.down_seconds > RESTART
    assert kinds(outcome)[-1] == "finished"


class Demanding(Planner):
    """Finds no plan for fewer than all eight devices."""

    def plan(self, problem: Problem) -> Answer:
        if len(problem.cluster.devices) < 8:
            return Answer(plan=None, refusal="it takes eight devices")
        return super().plan(problem)


@pytest.mark.parametrize("comes", [True, False])
def test_a_job_without_a_plan_for_those_left_waits_with_its_state_for_more(comes: bool) -> None:
    faults = [Fault(kind="kill", device="n2/1", seconds=40.0)]
    faults += [Fault(kind="join", device="n2/1", seconds=400.0)] if comes else []
    given = scene(*faults)
    outcome = Simulation(given, planner=Demanding(given.times)).play()
    check_history(outcome)
    assert "it takes eight devices" in first(outcome, "waiting").text
    ours = total(outcome, "elasticd")
    assert (ours.restarts, ours.lost_steps, ours.recoveries) == (0, 0, int(comes))
    if comes:
        assert kinds(outcome)[-1] == "finished"
        assert 400 < first(outcome, "resumed").seconds < 405
        assert 360 < ours.recovery_seconds < 370
    else:
        assert outcome.stopped == "it waits for capacity, its state is safe: it takes eight devices"
        assert ours.steps < 60


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


def test_a_short_cut_costs_its_seconds_and_nothing_else() -> None:
    calm, cut = simulate(scene()), simulate(scene(Fault(kind="partition", node="n1", lasts=2.0, step=60)))
    check_history(cut)
    assert {"node_down", "healed"} <= set(kinds(cut))
    assert "fenced" not in kinds(cut)
    ours = total(cut, "elasticd")
    assert (ours.restarts, ours.recoveries, ours.lost_steps) == (0, 0, 0)
    assert 1 < ours.seconds - total(calm, "elasticd").seconds < 2
    stood = max(stretch.step_seconds for stretch in cut.stretches)
    assert stood > 2, "the step that waited took as long"
    still = total(cut, "no reaction").seconds - total(calm, "no reaction").seconds
    assert still == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize("lasts", sizes.beside([PATIENCE + 200], [30.0, PATIENCE + 200]))
def test_a_longer_cut_is_gone_on_from_without_the_node_whose_workers_come_again(lasts: float) -> None:
    calm = simulate(scene(steps=400))
    outcome = simulate(scene(Fault(kind="partition", node="n1", lasts=lasts, step=60), steps=400))
    check_history(outcome)
    assert first(outcome, "fenced").data["gone"] == ["n1/0", "n1/1"]
    assert first(outcome, "resumed").seconds - first(outcome, "fault").seconds < 8
    ours, still = total(outcome, "elasticd"), total(outcome, "no reaction")
    assert (ours.restarts, ours.recoveries, ours.lost_steps, ours.down_seconds) == (0, 1, 0, 0)
    assert kinds(outcome)[-1] == "finished"
    healed = [event for event in outcome.timeline if event.kind == "healed"]
    if lasts > 30:
        assert healed == [], "done before the node is back"
        assert still.restarts == 1
        return
    assert ours.switches == 1, "what was fenced off came again as another, and is used"
    assert ours.seconds - total(calm, "elasticd").seconds < lasts
    assert mean(outcome, outcome.stretches[-1].plan, after=88) == pytest.approx(
        mean(calm, 1, after=12), rel=0.02
    )


def test_longer_samples_take_longer_and_nobody_is_called_slow_for_it() -> None:
    roomy = parse(WIDE.replace("736 MiB", "4 GiB"), "wide.toml")
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


def test_samples_that_do_not_fit_any_more_kill_workers_until_a_start_knows_their_length() -> None:
    """The coordinator plans for the length that it was told: no plan of its helps."""
    fault = Fault(kind="shift", tokens=4096, step=60)
    # Four pipelines as fast as can be keep too much of it; fewer, of more devices, do not.
    roomy = parse(WIDE.replace("736 MiB", "2304 MiB"), "wide.toml")
    outcome = simulate(msgspec.structs.replace(roomy, faults=(fault,), steps=90))
    check_history(outcome)
    assert "is out of memory" in first(outcome, "fenced").text
    assert "state is lost" in first(outcome, "stopped").text
    assert total(outcome, "elasticd").restarts == 1
    assert kinds(outcome)[-1] == "finished"


@pytest.mark.parametrize("step", sizes.beside([31, 34], [0, 1, 5, 31, 33, 34, 35, 36]))
def test_a_death_at_any_moment_of_a_switch_is_survived(step: int) -> None:
    faults = (
        Fault(kind="slow", device="n0/1", factor=3.0, step=30),
        Fault(kind="kill", device="n3/0", step=max(step, 1)),
        Fault(kind="takeover", step=step),
    )
    outcome = simulate(scene(*faults))
    check_history(outcome)
    assert kinds(outcome)[-1] == "finished"
    assert total(outcome, "elasticd").restarts == 0
    assert total(outcome, "elasticd").steps == 90


def test_a_day_of_all_faults_is_the_same_in_every_process(tmp_path: Path) -> None:
    text = WIDE.replace("736 MiB", "1152 MiB")  # holds the longer samples, also without a node
    text = text.replace("steps = 90", f"hours = {sizes.number(full=6, quick=2)}.0") + (
        "[random]\nslow_per_device_day = 4.0\nstop_per_device_day = 3.0\nrepair_hours = 0.5\n"
        '[[fault]]\nkind = "partition"\nnode = "n1"\nlasts = 700.0\nseconds = 900.0\n'
        '[[fault]]\nkind = "shift"\ntokens = 1536\nseconds = 5000.0\n'
    )
    path = tmp_path / "wide.toml"
    path.write_text(text)
    here = simulate(parse(text, str(path)))
    check_history(here)
    assert {"slow", "fenced", "resumed", "joined", "healed"} <= set(kinds(here))
    assert len({run.seconds for run in here.totals}) == 1
    command = (sys.executable, "-m", "elasticd", "simulate", str(path), "--json")
    env = {**os.environ, "PYTHONHASHSEED": "5"}
    done = subprocess.run(command, capture_output=True, env=env, timeout=400, check=True)
    assert done.stdout.strip() == here.to_json().strip()
