"""Recovery from snapshots in the agents' memory, as the leader handles it, at every prefix."""

from __future__ import annotations

import pytest

from elasticd.machines.job.state.events import AgentUp
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.machines.job.state.snapshot_sets import Moment
from tests import sizes
from tests.machines.cast import node_record
from tests.machines.vaulted import TIGHT, Vaulted


def running(nodes: tuple[str, ...] = ("alpha", "beta"), **changes: int) -> Vaulted:
    world = Vaulted(nodes, **changes)
    world.start()
    world.settle()
    world.train(4)
    assert world.phase is JobPhase.RUNNING
    return world


def recovered(world: Vaulted) -> bool:
    plan = world.plan()
    return (
        world.phase is JobPhase.RUNNING
        and plan is not None
        and all(world.workers[d].alive and world.workers[d].plan == plan.number for d in plan.members)
    )


def wait(world: Vaulted, seconds: int = 8) -> None:
    for _ in range(2 * seconds):
        world.tick(0.5)


def come_again(world: Vaulted, *nodes: str) -> None:
    for node in nodes:
        world.restart(node)
    world.settle()


def test_a_set_is_whole_once_two_nodes_keep_each_share_and_older_ones_go() -> None:
    world = running()
    whole = world.job.snapshots.whole
    assert whole == Moment(world.job.number, world.steps)
    assert all({held.step for held in vault} == {world.steps} for vault in world.vaults.values())
    assert world.kinds().count("snapshot") == 1, "not one note a step"
    world.quiet = {"alpha"}
    world.train(2)
    assert world.job.snapshots.whole == whole, "alpha alone keeps its own"


def test_state_that_died_with_its_holder_is_read_from_the_newest_snapshots() -> None:
    world = running()
    world.every = 1000
    world.train(3)
    before = world.plan()
    assert before is not None
    world.kill(before.members[-1])
    world.settle()
    assert recovered(world), world.job.reason
    proposal = world.proposals[-1]
    assert proposal.recovery is not None
    assert proposal.old == before
    assert len({*proposal.recovery.snapshots.values()}) == 3, "all that live read a part"
    assert world.gone_back == [3]
    assert world.job.steps.progress.step == world.steps
    told = [note.text for note in world.notes if note.kind in ("proposed", "recorded")][-2:]
    assert f"snapshots of step {world.steps} in memory on alpha, beta" in told[0]
    assert f"goes on from step {world.steps}, 3 before the last" in told[1]
    world.every = 1
    world.train(14)
    assert world.job.snapshots.whole is not None
    assert world.job.snapshots.whole >= (world.job.number, world.steps - 1)


def test_copies_that_live_are_newer_than_any_snapshot() -> None:
    world = running(memory=60_000_000)
    world.kill("beta/1")
    world.settle()
    assert recovered(world)
    assert world.gone_back == []


def test_a_job_whose_workers_all_died_waits_for_them_and_says_what_it_waits_for() -> None:
    world = running()
    step = world.steps
    world.kill_all()
    world.settle()
    wait(world)
    assert world.phase is JobPhase.RECOVERING
    assert f"no worker is left; the state is safe in snapshots of step {step} in memory on" in world.job.reason
    assert "give the job's command again, under the name demo" in world.job.reason
    assert world.kinds().count("waiting") == 1
    come_again(world, "alpha")
    assert world.phase is JobPhase.RECOVERING, "beta's may come, too"
    come_again(world, "beta")
    wait(world, 3)
    assert recovered(world), world.job.reason
    assert world.gone_back == [0]
    plan = world.plan()
    assert plan is not None
    assert len(plan.members) == 4
    assert world.job.reason == ""


def test_a_node_that_is_lost_with_its_agent_is_stood_in_for_by_its_peer() -> None:
    world = running(("alpha", "beta", "gamma"))
    world.lose("beta")
    world.disconnect("beta")
    wait(world)
    assert recovered(world), world.job.reason
    plan = world.plan()
    assert plan is not None
    assert not any(device.startswith("beta") for device in plan.members)


def test_workers_that_come_on_another_node_wait_for_one_that_keeps_the_snapshots() -> None:
    """The snapshots are with agents whose torchruns are gone."""
    world = running()
    world.kill_all()
    for node in ("alpha", "beta"):
        world.leave(node)
    world.settle()
    world.records["gamma"] = node_record("gamma", devices=4, memory=TIGHT, snapshots="gamma:1")
    world.vaults["gamma"], world.brought["gamma"] = {}, {}
    world.say(AgentUp(record=world.records["gamma"]))
    world.join("gamma", 1, 2)
    world.settle()
    wait(world, 40)
    assert world.phase is JobPhase.RECOVERING
    assert "no worker on node alpha, beta reads its part of snapshots" in world.job.reason
    world.joined.pop("alpha")
    for device in ("alpha/0", "alpha/1"):
        world.workers.pop(device)
    world.restarts += 1
    world.join("alpha", 1, 2)
    world.settle()
    wait(world)
    assert recovered(world), world.job.reason


def test_an_agent_that_was_started_anew_keeps_nothing_any_more() -> None:
    world = running()
    world.vaults = {node: {} for node in world.vaults}
    for node in ("alpha", "beta"):
        world.records[node] = node_record(node, agent="another", snapshots=f"{node}:2")
        world.reconnect(node)
    world.settle()
    assert world.job.snapshots.moments() == []
    world.kill("beta/1")
    world.settle()
    wait(world, 12)
    assert world.phase is JobPhase.STOPPED
    assert "there is no snapshot or checkpoint to go back to" in world.job.reason


@pytest.mark.parametrize("how", sizes.beside(["between"], ["before", "between", "after"]))
@pytest.mark.parametrize("loss", ["one", "all"])
def test_a_new_leader_at_any_event_of_a_recovery_from_snapshots(how: str, loss: str) -> None:
    def live(world: Vaulted) -> None:
        world.train(1)
        if loss == "one":
            world.kill("beta/1")
            world.settle()
        else:
            world.kill_all()
            world.settle()
            come_again(world, "alpha")
            come_again(world, "beta")
        wait(world, 14)

    whole = running()
    start = whole.events
    live(whole)
    for at in sizes.every(range(start + 1, min(whole.events, start + 120) + 1), 2):
        world = running()
        world.crash_at, world.crash_how = at, how
        live(world)
        where = f"crash {how} event {at}"
        assert recovered(world), f"{where}: {world.phase} {world.job.reason}"
        assert world.numbers == sorted({*world.numbers}), where
        assert sum(world.gone_back) <= 1, where


@pytest.mark.parametrize("more", range(24))
def test_everybody_dies_at_any_event_of_a_recovery_from_snapshots(more: int) -> None:
    world = running()
    world.kill("beta/1")
    for _ in range(more):
        if world.inbox or world.planning is not None:
            world.turn()
    world.kill_all()
    world.settle()
    come_again(world, "alpha", "beta")
    wait(world)
    assert recovered(world), world.job.reason
