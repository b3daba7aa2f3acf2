"""Stops, notices and deaths in any order and phase: the job ends, with a last checkpoint of those that live."""

from __future__ import annotations

import random

import pytest

from elasticd.coordinator.status import job_status
from elasticd.machines.job.state.events import CoordinatorSend, Effect, StopAsked
from elasticd.machines.job.state.job_state import OVER, JobPhase
from elasticd.wire.coordinator import End
from elasticd.wire.worker import DrainNotice, Finished, PeersLost, Saved, SaveFailed
from tests import sizes
from tests.machines.cast import JOB, FakeWorker
from tests.machines.test_recovery import ROOM
from tests.machines.walk import whole
from tests.machines.world import World

#: Seconds from the last thing that happens to a job that is being stopped until it is over.
MOST_SECONDS = 30.0


class Ending(World):
    """A world whose workers drain when their agents tell them to, and make last checkpoints as ranks do.

    After a vote in which all members drain, and one has no last checkpoint yet, they write one together; the
    next moment it is published, and they say so. One that stands by and drains leaves. Members that miss one
    of theirs stand still.
    """

    def __init__(self, nodes: tuple[str, ...] = ("alpha", "beta", "gamma"), memory: int = ROOM) -> None:
        self.draining: set[str] = set()  # incarnations that have heard SIGTERM
        self.saved: set[str] = set()  # incarnations whose last checkpoint is made
        self.writing: tuple[int, ...] = ()  # the step of the checkpoint that is being written
        self.checkpoint = 0  # the step of the newest one
        super().__init__(nodes, memory=memory)

    def _execute(self, effect: Effect) -> None:
        super()._execute(effect)
        if isinstance(effect, CoordinatorSend) and isinstance(effect.message, End):
            for device in effect.message.devices:
                if effect.node not in self.cut:
                    self.terminate(device)

    def terminate(self, device: str) -> None:
        """SIGTERM."""
        worker = self.workers.get(device)
        if worker is None or not worker.alive or worker.incarnation in self.draining:
            return
        self.draining.add(worker.incarnation)
        self.outcome(worker, DrainNotice(reason="SIGTERM", saves=True))

    def kill_node(self, node: str) -> None:
        """Agent and workers at once: nobody says so."""
        self.cut.add(node)
        for worker in self.workers.values():
            if worker.node == node:
                worker.alive = False
        self.disconnect(node)

    def pass_time(self, seconds: float = 0.5) -> None:
        """A step, the writing of a checkpoint or its end, or what those do who miss others."""
        plan, job = self.plan(), self.job
        if self.phase in OVER:
            return
        members = self._present()
        if plan is not None and not self._unresolved() and self._all_there(plan):
            if self.writing:
                self._publish(members)
            elif all(each.incarnation in self.draining for each in members) and not all(
                each.incarnation in self.saved for each in members
            ):
                self.train()
                if self.plan() == plan and not self._unresolved() and self.phase not in OVER:
                    self.writing = (self.steps,)
            else:
                self.train()
        else:
            self.writing = ()
            for worker in members:
                missing = plan is not None and worker.plan == plan.number and not self._unresolved()
                if missing and worker.node not in self.cut:
                    self.outcome(worker, PeersLost(step=self.steps, reason="closed", plan=worker.plan))
        for worker in list(self.workers.values()):
            bound = any(worker.device in each.members for each in job.candidates)
            if worker.alive and worker.incarnation in self.draining and not bound:
                self.leave_cleanly(worker.device, "it has drained")
        self._vote()
        self.tick(seconds)

    def _present(self) -> list[FakeWorker]:
        plan = self.plan()
        there = [self.workers[d] for d in (plan.members if plan is not None else ()) if d in self.workers]
        return [worker for worker in there if worker.alive]

    def _publish(self, members: list[FakeWorker]) -> None:
        (step,), self.writing = self.writing, ()
        self.outcome(members[0], Saved(name=f"step-{step}", step=step, plan=members[0].plan))
        self.checkpoint = step
        for worker in members:
            self.saved.add(worker.incarnation)
            self.outcome(worker, DrainNotice(reason="it made its last checkpoint"))

    def stop(self, seconds: float = 600.0) -> None:
        self.say(StopAsked(job=JOB, by="alice@host", seconds=seconds))
        self.settle()

    def end(self, seconds: float = MOST_SECONDS) -> None:
        """Until the job is over."""
        until = self.now + seconds
        while self.phase not in OVER and self.now < until:
            self.pass_time()
        assert self.phase is JobPhase.STOPPED, f"{self.phase.value} for {seconds} s: {self.job.reason}"
        assert "defect" not in self.kinds()


def begun(nodes: tuple[str, ...] = ("alpha", "beta", "gamma"), memory: int = ROOM) -> Ending:
    world = Ending(nodes, memory)
    world.start()
    world.settle()
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    return world


def with_standby(device: str) -> Ending:
    """A job whose plan leaves a slow device out."""
    world = begun()
    world.rates = {device: 20.0}
    for _ in range(60):
        plan = world.plan()
        if plan is not None and device not in plan.members:
            return world
        world.train()
    raise AssertionError("the slow device is used still")


def saved_all(world: Ending) -> None:
    """The last checkpoint is of the last step that those who live made."""
    assert world.checkpoint == world.steps, world.job.reason


@pytest.mark.parametrize("seconds", [0.0, 2.0, 12.0])
def test_a_standby_that_went_with_its_node_is_not_waited_for(seconds: float) -> None:
    world = with_standby("alpha/1")
    world.kill_node("alpha")
    until = world.now + seconds
    while world.now < until:
        world.pass_time()
    world.stop()
    world.end()
    saved_all(world)


def test_what_was_kept_of_the_standby_of_a_node_that_is_gone_does_not_hold_plans_up() -> None:
    world = with_standby("alpha/1")
    world.kill_node("alpha")
    for _ in range(20):
        world.pass_time()
    number = world.job.number
    world.rates = {"beta/1": 20.0}
    for _ in range(60):
        world.pass_time()
    plan = world.plan()
    assert plan is not None
    assert plan.number > number
    assert "beta/1" not in plan.members


@pytest.mark.parametrize("how", ["stop", "notices"])
@pytest.mark.parametrize("after", range(7))
def test_a_death_while_all_drain_costs_no_step(how: str, after: int) -> None:
    world = begun()
    if how == "stop":
        world.stop()
    else:
        for device in [*world.workers]:
            world.terminate(device)
    for _ in range(after):
        if world.phase not in OVER:
            world.turn() if world.inbox else world.pass_time()
    if world.phase not in OVER:
        world.kill("beta/1")
    world.end()
    saved_all(world)


@pytest.mark.parametrize("how", ["before", "between", "after"])
def test_a_member_that_cannot_hear_the_stop_is_left_behind(how: str) -> None:
    world = begun()
    if how == "before":
        world.cut.add("beta")
        world.disconnect("beta")
    world.stop()
    if how != "before":
        world.kill_node("beta")
    if how == "after":
        world.kill("gamma/0")
    world.end()
    saved_all(world)


def test_a_stop_whose_last_checkpoint_failed_is_no_orderly_end_and_says_why() -> None:
    world = begun()
    world.outcome(world.workers["alpha/0"], Saved(name="step-00000001.plan-1.x", step=1, plan=1))
    why = "could not write: no space left in /full"
    world.stop()
    world.outcome(world.workers["beta/0"], SaveFailed(step=world.steps, plan=1, reason=why))
    world.outcome(world.workers["gamma/0"], SaveFailed(step=world.steps, plan=1, reason=why))
    for device in [*world.workers]:
        world.outcome(world.workers[device], DrainNotice(reason="it is done with its last checkpoint"))
    world.settle()
    done = world.done()
    assert done is not None
    assert not done.orderly
    assert f"after 3 steps; the last checkpoint failed ({why})" in done.reason
    assert "the newest checkpoint is of step 1: 2 steps are lost" in done.reason
    assert [n.text for n in world.notes if n.kind == "checkpoint_failed"] == [
        f"no checkpoint of step 3: beta/0 {why}"
    ]


def test_a_last_step_without_its_checkpoint_ends_no_job_well() -> None:
    world = begun()
    world.outcome(world.workers["alpha/0"], Saved(name="step-00000001.plan-1.x", step=1, plan=1))
    why = "could not write: no space left in /full"
    world.outcome(world.workers["beta/0"], SaveFailed(step=world.steps, plan=1, reason=why))
    for device in [*world.workers]:
        world.outcome(world.workers[device], Finished(step=world.steps, saved=False))
    world.settle()
    done = world.done()
    assert done is not None
    assert not done.orderly
    assert world.job.phase is JobPhase.STOPPED
    assert done.reason.startswith(
        f"made all its steps, and not its last checkpoint, after 3 steps; the last checkpoint failed ({why}); "
        "the newest checkpoint is of step 1: 2 steps are lost"
    )
    assert "finished" not in world.kinds()


@pytest.mark.parametrize("then", ["nothing", "a newer one is made"])
def test_a_failed_checkpoint_is_shown_until_a_newer_one_is_made(then: str) -> None:
    world = begun()
    world.outcome(world.workers["beta/0"], SaveFailed(step=3, plan=1, reason="could not write: no space"))
    skipped = SaveFailed(step=4, plan=1, reason="skips it", skipped=True)
    world.outcome(world.workers["alpha/0"], skipped)
    if then != "nothing":
        world.outcome(world.workers["alpha/0"], Saved(name="step-00000005.plan-1.x", step=5, plan=1))
    world.settle()
    found = job_status(world.job, world.now + 9.0, 0.0, None).checkpoint
    assert found is not None
    if then == "nothing":
        assert (found.step, found.failed_step, found.failure) == (0, 3, "could not write: no space")
    else:
        assert (found.step, found.age_seconds, found.failed_step) == (5, 9.0, None)
    assert world.kinds().count("checkpoint_failed") == 2


def test_notices_to_all_who_live_after_a_node_with_a_standby_died_cost_no_step() -> None:
    world = with_standby("alpha/1")
    world.kill_node("alpha")
    for node in ("beta", "gamma"):
        for device in world.records[node].devices:
            world.terminate(device.name)
    world.end()
    saved_all(world)


@pytest.mark.parametrize("when", ["before", "after they were told"])
def test_a_stop_of_a_job_whose_members_can_none_be_reached_ends_without_a_checkpoint(when: str) -> None:
    world = begun(("alpha", "beta"))
    if when != "before":
        world.stop()
    for node in ("alpha", "beta"):
        world.kill_node(node)
    if when == "before":
        world.stop()
    world.end()
    assert "cannot be reached, and nobody else holds the state" in world.job.reason
    assert not world.job.ending.orderly


class EndingWalk(Ending):
    """Deaths of processes and nodes, notices, slow devices, and then a stop, between any two events."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        super().__init__(memory=self.draw.choice((ROOM, ROOM, 6_000_000)))
        self.start()
        self.train(self.draw.randrange(1, 14))
        self.deaths = self.draw.randrange(0, 3)

    def walk(self) -> None:
        stop_at = self.draw.randrange(24)
        for index in range(24):
            if self.phase in OVER:
                return
            if index == stop_at:
                self.say(StopAsked(job=JOB, by="alice@host", seconds=600.0))
            move = self.draw.choice(("turn", "turn", "turn", "pass", "pass", "pass", "die", "slow", "notice"))
            if move == "turn":
                for _ in range(self.draw.randrange(1, 6)):
                    if self.inbox:
                        self.turn()
            elif move == "pass":
                self.pass_time(self.draw.choice((0.1, 0.5, 2.0)))
            elif move == "slow":
                self.rates = {device: self.draw.choice((1.0, 1.0, 20.0)) for device in self.workers}
            elif move == "notice" and self.draw.random() < 0.3:
                for device in self.draw.choice(([*self.workers], [self.draw.choice([*self.workers])])):
                    self.terminate(device)
            elif move == "die" and self.deaths:
                self.deaths -= 1
                self._die()

    def _die(self) -> None:
        there = [each for each in self.workers.values() if each.alive and each.node not in self.cut]
        if not there:
            return
        worker = self.draw.choice(there)
        if self.draw.random() < 0.4:
            self.kill_node(worker.node)
        else:
            self.kill(worker.device)


SEEDS = sizes.number(full=2000, quick=20)


@pytest.mark.parametrize("part", range(4))
def test_any_order_of_deaths_notices_and_a_stop_ends_with_a_checkpoint_of_those_that_live(
    part: int, seed: int
) -> None:
    for number in range(part, SEEDS, 4):
        walked(seed + number)


def walked(number: int) -> None:
    world = EndingWalk(number)
    try:
        world.walk()
        world.end()
    except Exception as error:
        raise AssertionError(f"walk {number}") from error
    if world.checkpoint != world.steps:
        assert not whole(world), f"walk {number}: {world.checkpoint} of {world.steps}: {world.job.reason}"
