"""Openings of clients that a leader of another release cannot decode: who is told so, and who trains on."""

from __future__ import annotations

from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.wire.coordinator import ToClient, Unread
from elasticd.wire.worker import FromWorker, Hello, Rejected
from tests.machines.cast import JOB
from tests.machines.test_recovery import ROOM, recovered
from tests.machines.world import World

ODD = "beta/1"


class Mixed(World):
    """The hello of one worker is of another release, which the leader cannot decode from some time on."""

    odd = False

    def up(self, device: str, body: FromWorker) -> None:
        if self.odd and device == ODD and isinstance(body, Hello):
            self.opens(device, self.workers[device].incarnation)
        else:
            super().up(device, body)

    def opens(
        self, device: str, incarnation: str = "", *, node: str = "beta", job: str = JOB, slot: int = -1
    ) -> None:
        """Such an opening, of a worker or (no device) of a torchrun."""
        reason = "Expected `int`, got `str` - at `$.body.pid`"
        opening = Unread(
            client="odd", job=job, device=device, incarnation=incarnation, reason=reason, slot=slot
        )
        self.say(Received(node=node, message=opening))

    def refused(self) -> list[str]:
        """What the client was told."""
        sent = [send.message for send in self.sent if isinstance(send.message, ToClient)]
        return [down.body.reason for down in sent if down.client == "odd" and isinstance(down.body, Rejected)]


def running() -> Mixed:
    world = Mixed(memory=ROOM)
    world.start()
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    return world


def test_a_job_that_waits_for_such_a_worker_ends_with_the_reason() -> None:
    world = Mixed()
    world.odd = True
    for node in world.records:
        world.join(node)
    world.settle()
    (why,) = world.refused()
    assert "cannot decode the hello of worker beta/1: Expected `int`, got `str`" in why
    assert "install the same release" in why
    assert world.phase is JobPhase.STOPPED
    assert why in world.job.reason


def test_one_that_comes_later_is_told_and_the_job_trains_on_without_it() -> None:
    world = running()
    before = dict(world.job.workers)
    world.opens(ODD, "another")
    world.settle()
    assert len(world.refused()) == 1
    assert world.job.workers == before
    world.train(2)
    assert world.phase is JobPhase.RUNNING


def test_a_member_of_a_plan_trains_on_under_a_new_leader_that_cannot_decode_its_hello() -> None:
    """The leader went back to an older release, say."""
    world = running()
    plan = world.plan()
    world.odd = True
    world.new_leader()
    world.settle()
    for _ in range(20):
        world.tick(1.0)
    assert world.refused() == []
    assert (world.plan(), recovered(world)) == (plan, True)
    world.train(2)
    assert world.job.steps.progress.step == world.steps
    world.opens(ODD, world.workers[ODD].incarnation)  # its agent links up again
    world.train(2)
    assert "fenced" not in world.kinds()
    assert world.phase is JobPhase.RUNNING


def test_a_torchrun_is_told_unless_its_workers_are_there() -> None:
    world = running()
    world.opens("")
    world.settle()
    assert world.refused() == []
    world.opens("", node="gamma")
    world.settle()
    assert world.refused() == [], "a node that nobody has heard of has no say"
    world.kill("beta/1")
    world.settle()
    world.opens("", slot=0)
    world.settle()
    assert world.refused() == []
    world.opens("", slot=1)
    world.settle()
    assert ["of this torchrun" in why for why in world.refused()] == [True]
    world.kill("beta/0")
    world.settle()
    world.opens("")
    world.settle()
    assert ["of this torchrun" in why for why in world.refused()] == [True, True]


def test_one_of_a_job_that_nobody_has_heard_of_is_told_and_makes_none() -> None:
    world = running()
    world.opens(ODD, "another", job="other")
    world.settle()
    assert len(world.refused()) == 1
    assert set(world.state.jobs) == {JOB}
