"""Workers share tokens by the speed of lanes without their leader, which tells of it."""

from __future__ import annotations

from tests.machines.test_coordinator_faults import running


def test_a_share_that_has_changed_is_told_once_and_not_the_one_that_a_plan_begins_with() -> None:
    world = running()
    plan = world.plan()
    assert plan is not None
    heads = [lane.stages[0].devices[0] for lane in plan.by_lane]
    world.slowdowns = dict.fromkeys(plan.places, 64)
    world.train(3)
    assert "shares" not in world.kinds()
    world.slowdowns[heads[-1]] = 128
    world.train(3)
    (note,) = [note for note in world.notes if note.kind == "shares"]
    assert f"the lane of {heads[-1]} takes 2.00 times as long as a normal one" in note.text
    assert "it gets 0.50 of a share of tokens. No state moved." in note.text
    assert world.job.shares[heads[-1]] == 128


def test_jobs_that_pad_tell_nothing() -> None:
    world = running()
    world.train(3)
    assert world.job.shares == {}
