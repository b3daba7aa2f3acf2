"""Scripts in the simulator: freezes, cuts and agents that start anew; and random scripts, checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from elasticd.coordinator.commands import Commands
from elasticd.simulator.planning import Planner
from elasticd.simulator.run import Simulation
from elasticd.trusted_time import ReadTimes
from tests import sizes
from tests.soak.fault_script import Faults
from tests.soak.random_faults import Soaking, draw
from tests.soak.simulated import TIMES, Play, cluster, play, plays, scenario

SHAPE = cluster(3, 2)
DEVICES = [device.name for device in SHAPE.cluster().devices]


def played(script: Faults) -> Play:
    result = play(scenario(script, SHAPE, seed=3))
    assert result.wrong == ()
    assert result.stopped == ""
    return result


def test_a_short_freeze_costs_its_seconds_and_nothing_else() -> None:
    calm = Simulation(scenario(Faults().recover("n0/0").at_step(20), SHAPE, seed=3))
    calm.run()
    frozen = Simulation(scenario(Faults().freeze("n0/0", 3.0).at_step(20), SHAPE, seed=3))
    frozen.run()
    assert frozen.worker_group.step == calm.worker_group.step
    assert 2.5 < frozen.engine.now() - calm.engine.now() < 3.5
    assert not [event for event in frozen.timeline if event.kind == "fenced"]


def test_a_worker_frozen_while_another_dies_is_gone_on_with_or_without() -> None:
    result = played(Faults().freeze("n0/0", 30.0).kill("n1/0", 5.0).at_step(20))
    assert result.fences >= 1


def test_a_cut_node_trains_on_and_nobody_is_fenced_off() -> None:
    result = played(Faults().cut("n1").at_step(20).heal("n1").at_step(60))
    assert result.fences == 0


def test_a_death_while_another_node_is_cut_is_survived() -> None:
    result = played(Faults().cut("n1", 20.0).kill("n2/0", 4.0).at_step(20))
    assert result.fences >= 1


@pytest.mark.parametrize("step", [0, 1, 5, 21, 22, 23, 24, 25])
def test_an_agent_that_starts_anew_at_any_moment_costs_nothing(step: int) -> None:
    script = Faults().slow("n0/1", 3.0).at_step(15).restart("n0").at_step(step)
    result = played(script)
    assert (result.fences, result.restarts) == (0, 0)


def test_random_scripts_break_nothing() -> None:
    planner = Planner(TIMES)
    plays = [
        play(scenario(draw(Soaking(count=10, most=8), DEVICES, seed), SHAPE, seed), planner)
        for seed in range(100, 106)
    ]
    assert {one.seed: one.wrong for one in plays if one.wrong} == {}
    assert sum(one.fences for one in plays) > 0


def _with_users(seeds: range) -> list[Play]:
    """Random jobs and scripts, with a store that is late, loses and repeats; users ask for decisions."""
    return [*plays(seeds, 12)]


@pytest.mark.parametrize("part", sizes.beside([0], range(2)))
def test_what_users_were_told_is_so_in_the_store_whatever_becomes_of_store_and_leaders(
    part: int, seed: int
) -> None:
    count = sizes.number(full=400, quick=8)
    first = seed * 1000 + part * count
    plays = _with_users(range(first, first + count))
    assert {one.seed: one.wrong for one in plays if one.wrong} == {}
    answers = sum((Counter(one.answers) for one in plays), Counter[str]())
    assert min(answers["ok"], answers["unchanged"], answers["none"]) > 0, "each answer is given"
    assert sum(one.leaders for one in plays) > 2 * count


def test_a_seed_plays_the_same_again() -> None:
    """Threads of the agents' registrars and tasks of leaders among it."""
    assert _with_users(range(17, 18)) == _with_users(range(17, 18))


@pytest.mark.full  # what is asked of a play is asked of the one below, too
def test_leader_that_goes_by_its_clock_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(cls: type[ReadTimes], wall: float, *_: object) -> ReadTimes:
        return ReadTimes(trusted=wall, stamp=wall, led=wall)

    monkeypatch.setattr(ReadTimes, "of", classmethod(of))
    wrong = [line for one in _with_users(range(3)) for line in one.wrong]
    assert any("which nobody had asked for" in line for line in wrong)


def test_leader_that_answers_before_its_decision_is_in_the_store_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def decide(self: Commands, decision: Callable[[], object], audit: Callable[[], None]) -> object:
        answer = decision()
        audit()
        return answer

    monkeypatch.setattr(Commands, "decide", decide)
    wrong = [line for one in _with_users(range(3)) for line in one.wrong]
    assert any("the store never had it" in line for line in wrong)


def test_a_worker_that_is_cut_off_prepares_a_proposal_that_the_others_gave_up() -> None:
    """Seed 34354692 of the soak."""
    (played,) = plays([34354692], 12, modules=False)
    assert not played.wrong
