"""Members that want an older state go back together, whoever dies or leads meanwhile."""

from __future__ import annotations

import pytest

from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.worker import PeersLost
from tests import sizes
from tests.machines.test_snapshots import come_again, recovered, running, wait
from tests.machines.vaulted import Vaulted

WHY = "step 6 would have harmed the weights: its loss is not finite"


def wanting(**changes: int) -> Vaulted:
    """A job three steps after its newest snapshots."""
    world = running(**changes)
    world.every = 1000
    world.train(3)
    return world


def want(world: Vaulted, most: int = 100) -> None:
    """All members say it, as they do after the same vote."""
    plan = world.plan()
    assert plan is not None
    for device in plan.members[:most]:
        if world.workers[device].alive:
            word = PeersLost(step=world.steps, reason=WHY, plan=plan.number, back=world.steps - 1)
            world.outcome(world.workers[device], word)


def test_all_go_back_to_the_newest_snapshots_and_are_told_what_to_leave_out() -> None:
    world = wanting()
    last, before = world.steps - 1, world.plan()
    want(world)
    world.settle()
    assert recovered(world), world.job.reason
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert recovery.snapshots, "copies live, and are not gone on from"
    assert recovery.leave_out == last
    assert world.gone_back == [3]
    assert before is not None
    assert world.plan().members == before.members  # type: ignore[union-attr]
    fences = [note.text for note in world.notes if note.kind == "fenced"]
    assert len(fences) == 1
    assert WHY in fences[0]
    world.train(2)
    world.kill("beta/1")
    wait(world)
    later = world.proposals[-1].recovery
    assert later is not None
    assert later.leave_out == -1, "of that time alone"


def test_one_that_says_so_alone_has_all_go_back() -> None:
    world = wanting()
    want(world, most=1)
    world.settle()
    wait(world)
    assert recovered(world), world.job.reason
    assert world.gone_back == [3]


def test_without_an_older_state_they_go_on_from_what_they_have() -> None:
    world = Vaulted(("alpha", "beta"))
    world.every = 1000
    world.start()
    world.settle()
    world.train(4)
    want(world)
    world.settle()
    assert recovered(world), world.job.reason
    assert world.gone_back == []
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert (recovery.snapshots, recovery.leave_out) == ({}, world.steps - 1), (
        "so that they do not want it again"
    )


@pytest.mark.parametrize("dies", ["", "alpha/0", "beta/1"])
@pytest.mark.parametrize("at", range(24))
def test_a_death_at_any_event_meanwhile_changes_nothing_of_it(dies: str, at: int) -> None:
    world = wanting()
    last = world.steps - 1
    want(world)
    for _ in range(at):
        if world.inbox or world.planning is not None:
            world.turn()
    if dies:
        world.kill(dies)
    world.settle()
    wait(world)
    assert recovered(world), world.job.reason
    assert sum(world.gone_back) in (3, 0) if dies else world.gone_back == [3]
    assert any(each.recovery is not None and each.recovery.leave_out == last for each in world.proposals)


@pytest.mark.parametrize("how", sizes.beside(["between"], ["before", "between", "after"]))
def test_a_new_leader_at_any_event_meanwhile_goes_back_too(how: str) -> None:
    whole = wanting()
    start = whole.events
    want(whole)
    whole.settle()
    wait(whole)
    for at in sizes.every(range(start + 1, min(whole.events, start + 120) + 1), 2):
        world = wanting()
        world.crash_at, world.crash_how = at, how
        want(world)
        world.settle()
        wait(world, 14)
        where = f"crash {how} event {at}"
        assert recovered(world), f"{where}: {world.phase} {world.job.reason}"
        assert world.job.phase is JobPhase.RUNNING, where
        assert sum(world.gone_back) <= 3, where


def test_it_goes_back_as_long_as_its_wish_is_open_though_all_die() -> None:
    world = wanting()
    last = world.steps - 1
    want(world)
    world.turn()
    world.kill_all()
    world.settle()
    come_again(world, "alpha", "beta")
    wait(world)
    assert recovered(world), world.job.reason
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert recovery.leave_out == last
