"""Where no copies that live are whole: which older state is gone on from, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from elasticd.machines.job.copies.rollback import checkpoint_names
from elasticd.machines.job.state.events import AgentDown
from elasticd.machines.job.state.job_state import JobPhase, JobSettings
from elasticd.machines.job.state.last_checkpoint import newest
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import HistoryRecord, PublishedCheckpoint, decode
from elasticd.wire.coordinator import ToClient
from elasticd.wire.worker import Hello, PeersLost, Saved, SaveNow
from tests.machines.cast import JOB, FakeWorker
from tests.machines.checked import KEYS
from tests.machines.test_snapshots import come_again, recovered, wait
from tests.machines.vaulted import Vaulted

NEVER = 10**6


def started(every: int) -> Vaulted:
    world = Vaulted(every=every)
    world.start()
    world.settle()
    return world


def save(world: Vaulted) -> str:
    plan = world.plan()
    assert plan is not None
    name = f"step-{world.steps:08d}.plan-{plan.number}.x"
    world.up(plan.members[0], Saved(name=name, step=world.steps, plan=plan.number))
    world.settle()
    return name


def publish(world: Vaulted, published: tuple[PublishedCheckpoint, ...]) -> None:
    job = world.job.changed("checkpoints", published=published)
    world.state = msgspec.structs.replace(world.state, jobs={JOB: job})


def reason(world: Vaulted, number: int) -> str:
    item = world.store.get(KEYS.history(JOB, number))
    assert item is not None
    return decode(item.value, HistoryRecord).reason


@pytest.mark.parametrize("loss", ["one", "all"])
def test_without_snapshots_the_newest_checkpoint_is_gone_on_from(loss: str) -> None:
    world = started(NEVER)
    world.train(3)
    save(world)
    world.train(2)
    name = save(world)
    world.train(4)
    if loss == "one":
        world.kill("beta/1")
        world.settle()
    else:
        world.kill_all()
        world.settle()
        wait(world)
        assert f"no worker is left; the state is safe in checkpoint {name}" in world.job.reason
        come_again(world, "alpha", "beta")
        wait(world, 2)
    assert recovered(world), world.job.reason
    proposal = world.proposals[-1]
    assert proposal.old is None
    assert proposal.checkpoints[0] == name
    assert len(proposal.checkpoints) == 2
    assert proposal.recovery is not None
    assert (proposal.recovery.step, proposal.recovery.sources) == (-1, {})
    assert world.gone_back == [4]
    assert world.job.steps.progress.step == world.steps
    assert f"the state is read from checkpoint {name}" in reason(world, proposal.number)
    world.train(2)
    assert world.job.steps.progress.step == world.steps


@pytest.mark.parametrize("newer", ["snapshot", "checkpoint"])
def test_of_snapshots_and_checkpoints_the_newer_is_taken(newer: str) -> None:
    world = started(1)
    world.train(2)
    if newer == "snapshot":
        save(world)
    world.train(2)
    if newer == "checkpoint":
        world.every = NEVER
        world.train(2)
        save(world)
    world.kill("beta/1")
    world.settle()
    assert recovered(world), world.job.reason
    assert (world.proposals[-1].old is None) == (newer == "checkpoint")


def test_a_checkpoint_beyond_the_step_that_the_job_went_back_to_is_never_used() -> None:
    world = started(1)
    world.train(2)
    world.every = NEVER
    world.train(2)
    dead = save(world)
    published = world.job.checkpoints.published
    assert [one.name for one in published] == [dead]
    publish(world, ())  # nobody can read it now
    world.kill("beta/1")
    world.settle()
    assert recovered(world)
    assert world.steps == 3
    publish(world, published)
    for vault in world.vaults.values():
        vault.clear()
    for node in world.records:
        world.say_keeps(node)
    world.settle()
    world.kill("beta/0")
    world.settle()
    wait(world, 12)
    assert world.phase is JobPhase.STOPPED
    assert "there is no snapshot or checkpoint to go back to" in world.job.reason


def saves_now(world: Vaulted) -> int:
    """How often a worker was told to have a checkpoint made."""
    return sum(
        isinstance(sent.message, ToClient) and isinstance(sent.message.body, SaveNow) for sent in world.sent
    )


def gone_back(world: Vaulted, word: Callable[[], Any], at: int = 0) -> None:
    """Members that want an older state have gone back three steps; `word` is said after so many events."""
    world.every = NEVER
    world.train(3)
    plan = world.plan()
    assert plan is not None
    for device in plan.members:
        wish = PeersLost(step=world.steps, reason="a spike", plan=plan.number, back=world.steps - 1)
        world.outcome(world.workers[device], wish)
    for _ in range(at):
        if world.inbox or world.planning is not None:
            world.turn()
    word()
    world.settle()
    wait(world)
    assert recovered(world), world.job.reason


def of_later_step(world: Vaulted) -> Saved:
    """A checkpoint two steps beyond the newest snapshots."""
    plan, step = world.plan(), world.steps + 2
    assert plan is not None
    return Saved(name=f"step-{step:08d}.plan-{plan.number}.x", step=step, plan=plan.number)


@pytest.mark.parametrize("at", range(0, 30, 2))
def test_a_checkpoint_that_is_whole_as_the_job_goes_back_is_gone_on_from_or_dead(at: int) -> None:
    """It is never published as a part of the history, and then left behind."""
    world = started(1)
    world.train(3)
    saved = of_later_step(world)
    gone_back(world, lambda: world.up("alpha/0", saved), at)
    if world.steps == saved.step:
        assert [(one.name, one.dead) for one in world.job.checkpoints.published] == [(saved.name, False)]
    else:
        assert world.steps < saved.step
        assert all(one.dead for one in world.job.checkpoints.published)
        assert saves_now(world) == len(world.job.checkpoints.published)
    assert world.job.checkpoints.unpublished == ()


def test_one_that_was_published_is_marked_and_another_is_made_for_the_next_start() -> None:
    """On disk it is the newest, by its step and by its number, until there is another one."""
    world = started(1)
    world.train(3)
    saved = of_later_step(world)
    gone_back(world, lambda: None)
    assert world.steps < saved.step
    publish(world, (PublishedCheckpoint(name=saved.name, step=saved.step, plan=saved.plan),))
    assert newest(world.job) is None
    world.kill("beta/1")
    world.settle()
    wait(world)
    assert recovered(world), world.job.reason
    assert [one.dead for one in world.job.checkpoints.published] == [True]
    assert saves_now(world) == 1
    world.new_leader()
    world.settle()
    wait(world)
    assert newest(world.job) is None, "a later leader, which knows less of the history, reads it, too"
    assert saved.name not in checkpoint_names(Transaction(world.job, {}, 1, JobSettings(), 0.0))


def test_a_recovery_from_snapshots_that_fails_again_and_again_takes_the_checkpoint() -> None:
    world = started(1)
    world.train(2)
    save(world)
    world.train(2)
    world.refuse = {"alpha/0"}  # it cannot read its share
    world.kill("beta/1")
    world.settle()
    for _ in range(20):
        world.tick(0.5)
        last = world.proposals[-1]
        if last.old is None:
            world.refuse = set()
    assert recovered(world), world.job.reason
    tried = [p for p in world.proposals if p.recovery is not None and p.status == "open"]
    assert [p.old is None for p in tried[:4]] == [False, False, False, True]


def test_what_fails_again_and_again_with_nothing_else_left_ends_the_job() -> None:
    world = started(1)
    world.train(2)
    world.refuse = {"alpha/0"}
    world.kill("beta/1")
    world.settle()
    wait(world, 12)
    assert world.phase is JobPhase.STOPPED
    assert "alpha/0 cannot prepare it" in world.job.reason


@pytest.mark.parametrize("else_", ["an older set", "nothing"])
def test_a_node_that_cannot_be_reached_is_waited_for_if_it_alone_keeps_the_newest(else_: str) -> None:
    world = Vaulted(("alpha", "beta", "gamma"))
    if else_ == "nothing":
        world.quiet = {*world.records}  # each agent keeps its own workers' alone
    world.start()
    world.settle()
    world.quiet = {*world.records}
    world.train(2)
    world.kill("beta/1")
    world.say(AgentDown(node="beta"))
    world.cut.add("beta")
    world.settle()
    wait(world, 4)
    assert world.phase is JobPhase.RECOVERING
    assert "beta cannot be reached, and alone keeps a part of snapshots of step" in world.job.reason
    wait(world, 20)
    if else_ == "an older set":
        assert recovered(world), world.job.reason
        assert world.gone_back == [2], "not for ever"
        return
    assert world.phase is JobPhase.RECOVERING
    world.cut.clear()
    world.reconnect("beta")
    come_again(world, "beta")
    wait(world, 4)
    assert recovered(world), world.job.reason


class Seeing(Vaulted):
    """Its workers see checkpoints that this job never published."""

    def hello(self, worker: FakeWorker, **changes: object) -> Hello:
        return msgspec.structs.replace(
            super().hello(worker, **changes), checkpoints=("step-00000000.plan-7.y",)
        )


def test_what_workers_saw_as_they_came_is_the_last_resort() -> None:
    world = Seeing(every=NEVER)
    world.start()
    world.settle()
    world.train(2)
    world.kill("beta/1")
    world.settle()
    assert recovered(world), world.job.reason
    assert world.proposals[-1].checkpoints == ("step-00000000.plan-7.y",)
