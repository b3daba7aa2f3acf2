"""How jobs end, or go on, when members leave early, agents are started again, and plans are given up."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from elasticd.machines.job.state.events import AgentUp, Received
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, fresh
from elasticd.wire.coordinator import FromClient
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import Closed, Rejected, Report
from tests.machines.asked import refused
from tests.machines.cast import FakeWorker
from tests.machines.test_coordinator_lives import fitted, slowed, started
from tests.machines.world import World

# -- the end, as torchruns and people hear of it ---------------------------------------------------------------


def test_torchrun_that_asks_after_a_failed_job_has_failed_and_after_a_finished_one_has_not() -> None:
    failed, done = started(), started()
    failed.kill("beta/1")
    done.finish()
    for world, answer in ((failed, Rejected), (done, Closed)):
        world.settle()
        world.join("alpha", pid=8)
        world.settle()
        (said,) = [body for body in world.told["talpha"] if isinstance(body, Rejected | Closed)]
        assert isinstance(said, answer)
    assert "beta/1 (pid 100) died" in refused(failed, "talpha")[0]


def test_progress_counts_the_updates_that_were_applied() -> None:
    world = started()
    plan = world.plan()
    assert plan is not None
    report = world.report(plan, plan.members[0])  # a step's index counts from 0
    first = msgspec.structs.replace(report.measurement, step=0)
    world.up(plan.members[0], Report(measurement=first, loss=2.0, tokens=64))
    world.settle()
    assert world.job.steps.progress.step == 1


# -- members that leave early ----------------------------------------------------------------------------------

WHY = "the script left the loop after 1 of 9 steps"


def test_member_that_leaves_while_others_stay_ends_the_job_with_its_reason() -> None:
    world = started()
    world.leave_cleanly("beta/1", WHY)
    world.settle()
    world.tick(1.5)
    assert world.phase is JobPhase.RUNNING, "the others may be leaving, too"
    world.reconnect("beta")  # its agent says so again, which is no new leave
    world.settle()
    world.tick(0.6)
    assert world.phase is JobPhase.STOPPED
    assert world.job.reason.startswith(f"worker beta/1 (pid 100) left before the last step: {WHY}; the same")
    assert world.kinds().count("worker_lost") == 1


def test_members_that_all_leave_end_the_job_at_once_with_their_reason() -> None:
    world = started()
    for device in world.workers:
        world.leave_cleanly(device, WHY)
    world.settle()
    assert world.phase is JobPhase.STOPPED
    assert world.job.reason.startswith(f"its workers left before the last step: {WHY}")
    assert world.job.ending.orderly, "a script that leaves its loop has not failed"


def test_member_that_leaves_while_a_plan_is_proposed_ends_the_job_too() -> None:
    world = fitted()
    world.deaf = {"alpha/1"}
    world.rates = {"beta/1": 3.0}
    while world.phase is not JobPhase.PROPOSED:
        world.train(1)
    world.leave_cleanly("beta/1", WHY)
    world.settle()
    world.tick(2.1)
    assert world.phase is JobPhase.STOPPED
    proposal = world.proposal()
    assert proposal is not None
    assert proposal.status == "aborted"


# -- plans that are given up again and again -------------------------------------------------------------------


def times_of(world: World, kind: str, seconds: int) -> list[float]:
    """When notes of this kind came, as the job trains for so long."""
    times: list[float] = []
    for _ in range(seconds):
        before = len(world.notes)
        world.train(1)
        times += [world.now for note in world.notes[before:] if note.kind == kind]
    return times


def refusing(settings: JobSettings) -> World:
    world = fitted()
    world.state = msgspec.structs.replace(world.state, settings=settings)
    world.refuse = {"alpha/0"}
    world.rates = {"beta/1": 3.0}
    return world


def test_plan_that_is_refused_again_and_again_is_tried_less_and_less_often() -> None:
    world = refusing(JobSettings(retry_seconds=4.0, most_retry_seconds=20.0))
    times = times_of(world, "aborted", 90)
    waits = [after - before for before, after in pairwise(times)]
    assert waits[:5] == pytest.approx([4, 8, 16, 20, 20], abs=1.1)
    said = [note for note in world.notes if note.kind == "put_off"]
    assert [note.data["times"] for note in said] == list(range(2, len(times) + 1))
    assert "given up 2 times; the next is tried in 8 s, or when they change" in said[0].text


def test_plan_for_other_rates_does_not_wait_for_one_that_was_refused() -> None:
    world = refusing(JobSettings(retry_seconds=4.0))
    assert len(times_of(world, "aborted", 60)) == 4
    world.refuse = set()
    world.rates = {"beta/1": 6.0}
    before = world.job.number
    world.train(9)
    assert world.job.number > before


# -- agents that are started again -----------------------------------------------------------------------------


def restarted(world: World, node: str) -> None:
    """Another agent serves the node: it knows none of the workers."""
    world.disconnect(node)
    world.records[node] = msgspec.structs.replace(world.records[node], agent="another")
    world.say(AgentUp(record=world.records[node]))
    world.settle()


def test_no_plan_is_proposed_for_workers_whose_agent_was_started_again_and_it_is_said_once() -> None:
    world = fitted()
    restarted(world, "alpha")
    restarted(world, "beta")
    world.say(AgentUp(record=world.records["beta"]))  # the same agent, after a broken link
    world.settle()
    told = [note.text for note in world.notes if note.kind == "agent_restarted"]
    assert [text.split("'")[0] for text in told] == ["node alpha", "node beta"]
    assert "nothing is replanned until they have come back to it" in told[0]
    world.rates = {"beta/1": 3.0}
    world.train(10)
    assert "slow" in world.kinds()
    assert world.numbers == [1, 2]
    assert world.phase is JobPhase.RUNNING


@pytest.mark.parametrize("phase", [JobPhase.ASSEMBLING, JobPhase.PLANNING])
def test_the_first_plan_waits_for_workers_whose_agent_was_started_again(phase: JobPhase) -> None:
    world = World()
    world.planner_waits = True
    world.start()
    assert world.phase is JobPhase.PLANNING
    if phase is JobPhase.ASSEMBLING:
        world.kill("alpha/1")
        world.settle()
        assert world.phase is phase
    restarted(world, "beta")
    assert world.phase is JobPhase.ASSEMBLING
    assert world.job.planning.asked is None, "the plan that was asked for has no worker of beta"
    assert "the first plan is made once its workers have come back to it" in world.notes[-1].text
    if phase is JobPhase.ASSEMBLING:  # its torchrun starts another
        world.workers["alpha/1"] = FakeWorker(device="alpha/1", incarnation="another")
        world.up("alpha/1", world.hello(world.workers["alpha/1"]))
        world.tick()
        assert world.phase is phase, "all are known, but not all have come back"
    world.reconnect("beta")
    world.planner_waits = False
    world.settle()
    world.train(3)
    assert world.phase is JobPhase.RUNNING
    assert world.steps == 3


def test_worker_that_does_not_come_back_to_an_agent_before_the_first_plan_ends_the_job() -> None:
    world = World()
    world.planner_waits = True
    world.start()
    world.disconnect("beta")
    world.tick(60.0)
    assert world.phase is JobPhase.PLANNING, "its agent is away, as it may be at any time"
    restarted(world, "beta")
    world.up("beta/0", world.hello(world.workers["beta/0"]))
    world.settle()
    world.tick(world.settings.reconnect_seconds - 0.1)
    assert world.phase is JobPhase.ASSEMBLING
    world.tick(0.2)
    assert world.phase is JobPhase.STOPPED
    why = "node beta's agent was started again before the first step, and worker beta/1 (pid 100) did not come"
    assert why in world.job.reason


def test_other_job_on_devices_of_workers_that_nobody_sees_gets_a_clear_answer() -> None:
    world = started()
    restarted(world, "alpha")
    body = Join(job="other", min_nodes=1, max_nodes=1, pid=9)
    world.say(
        Received(
            node="alpha", message=FromClient(client="t2", job="other", device="", incarnation="", body=body)
        )
    )
    world.settle()
    (reason,) = refused(world, "t2")
    assert "alpha/0, alpha/1: in use by job demo; a device belongs to one job at a time" in reason
    assert list(world.state.jobs) == ["demo"]


def test_job_whose_worker_is_turned_away_does_not_wait_for_it() -> None:
    world = started()
    hello = world.hello(world.workers["alpha/0"])
    late = msgspec.structs.replace(
        hello, job="late", world_size=2, spec=msgspec.structs.replace(hello.spec, job="late")
    )
    other = msgspec.structs.replace(world.records["alpha"], node="gamma", agent="agent-gamma")
    world.say(AgentUp(record=other))
    world.settle()
    both = fresh("late", JobPhase.ASSEMBLING, 0.0).changed("start", joined=("alpha", "gamma"))
    world.state = msgspec.structs.replace(world.state, jobs={**world.state.jobs, "late": both})
    for node, device in (("gamma", "gamma/0"), ("alpha", "alpha/0")):
        up = FromClient(client=f"x{device}", job="late", device=device, incarnation="y", body=late)
        world.say(Received(node=node, message=up))
    world.settle()
    assert "alpha/0: in use by job demo" in refused(world, "xalpha/0")[0]
    assert world.state.jobs["late"].phase is JobPhase.STOPPED
    assert "alpha/0: in use by job demo" in world.state.jobs["late"].reason
    assert world.phase is JobPhase.RUNNING


def test_rate_of_a_standby_worker_goes_with_it() -> None:
    world = slowed()
    world.rates = {"beta/1": 50.0}
    world.train(20)
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members, "so slow that it stands by"
    assert world.job.detection.rates.rates["beta/1"] > 3
    world.kill("beta/1")
    world.settle()
    assert world.phase is JobPhase.RUNNING
    assert "beta/1" not in world.job.detection.rates.rates
