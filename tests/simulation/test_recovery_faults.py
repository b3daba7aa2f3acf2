"""Faults in the midst of a recovery: at any moment of it another death, another leader, a cut or a return."""

from __future__ import annotations

import pytest

from elasticd.chaos.faults import Fault
from elasticd.simulator.results.result import Outcome
from elasticd.simulator.run import simulate
from tests import sizes
from tests.simulation.checks import check_history, kinds, total
from tests.simulation.test_faults import first, scene

DIES = 40.0
DEATH = Fault(kind="kill", device="n2/1", seconds=DIES)

#: The word of it, the fence, the plan, its preparation, the move, the gathering, and after the swap.
MOMENTS = (0.0, 0.0005, 0.0015, 0.0025, 0.2, 0.322, 1.5, 2.323, 2.6, 2.75, 2.8, 3.5)


def survived(*faults: Fault) -> Outcome:
    outcome = simulate(scene(DEATH, *faults))
    check_history(outcome)
    assert kinds(outcome)[-1] == "finished"
    ours = total(outcome, "elasticd")
    assert (ours.steps, ours.restarts, ours.lost_steps) == (90, 0, 0)
    return outcome


def test_the_moments_are_those_of_a_recovery() -> None:
    resumed = first(survived(), "resumed")
    assert MOMENTS[-2] - 0.2 < resumed.seconds - DIES < MOMENTS[-1]


# Before the fence, while the members prepare, before the swap, and after it.
@pytest.mark.parametrize("after", sizes.beside((2.323,), MOMENTS))
def test_another_death_at_any_moment_begins_it_anew_or_makes_a_second_one(after: float) -> None:
    """n3 has the other stage of the pipeline that n2 is of: all of it lives on n0 and n1."""
    outcome = survived(Fault(kind="kill", device="n3/0", seconds=DIES + after))
    plans = {event.data["number"] for event in outcome.timeline if event.kind == "recorded"}
    assert max(plans) == outcome.stretches[-1].plan
    assert total(outcome, "elasticd").recoveries == (2 if after > 3 else 1)


# During the fence, while the members prepare, and in the swap.
@pytest.mark.parametrize("after", sizes.beside((0.0005, 2.6), MOMENTS))
def test_another_leader_at_any_moment_finishes_it(after: float) -> None:
    outcome = survived(Fault(kind="takeover", seconds=DIES + after))
    assert "takeover" in kinds(outcome)
    assert total(outcome, "elasticd").recoveries >= 1


@pytest.mark.parametrize("after", sizes.every(MOMENTS[2::3], 2))
def test_a_node_that_is_cut_off_meanwhile_is_fenced_off_too_and_comes_again(after: float) -> None:
    cut = Fault(kind="partition", node="n3", lasts=20.0, seconds=DIES + after)
    outcome = survived(cut)
    gone = [event.data["gone"] for event in outcome.timeline if event.kind == "fenced"]
    assert ["n3/0", "n3/1"] in gone
    assert "healed" in kinds(outcome)
    assert total(outcome, "elasticd").switches >= 1, "it is used again"


@pytest.mark.parametrize("after", sizes.every(MOMENTS[3::3], 2))
def test_the_same_node_may_be_back_before_the_others_went_on(after: float) -> None:
    outcome = survived(Fault(kind="join", device="n2/1", seconds=DIES + after))
    assert first(outcome, "joined").data["node"] == "n2"
    names = {event.kind for event in outcome.timeline}
    assert not {"stopped", "waiting"} & names
