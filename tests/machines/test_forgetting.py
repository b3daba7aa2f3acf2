"""Jobs that are over leave the leader's state and the store: in time, by number, and when a user asks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from elasticd.machines.coordinator import finished_jobs, machine
from elasticd.machines.job.state.events import (
    AgentDown,
    AgentUp,
    CoordinatorTick,
    ForgetAsked,
    Received,
    Stored,
    Write,
)
from elasticd.machines.job.state.job_state import LIVE, OVER, JobPhase, JobSettings, JobState, fresh
from elasticd.records import DoneRecord
from elasticd.wire.coordinator import FromClient, WorkerLost
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import Rejected
from tests.machines.cast import JOB, node_record
from tests.machines.checked import KEYS
from tests.machines.test_coordinator_lives import started
from tests.machines.test_recovery import running
from tests.machines.world import World

WEEK = 7 * 86_400.0


def ended(world: World) -> World:
    """All workers' processes end too."""
    world.finish()
    world.settle()
    for device in list(world.workers):
        world.leave_cleanly(device, "the job is over")
    world.settle()
    return world


def kept(world: World) -> list[str]:
    """What the store holds of the job."""
    return [item.key.removeprefix(KEYS.job(JOB, "")) for item in world.store.snapshot(KEYS.jobs).items]


def ask(world: World) -> None:
    world.say(ForgetAsked(job=JOB, by="alice"))
    world.settle()


def test_job_is_forgotten_in_time_and_its_name_is_free_then() -> None:
    world = ended(running())
    assert {"plan", "done", "spec"} <= {*kept(world)}
    world.tick(WEEK - 100)
    assert JOB in world.state.jobs
    world.notes.clear()
    world.tick(200)
    assert JOB not in world.state.jobs
    assert kept(world) == []
    (note,) = world.notes
    assert (note.kind, note.job, note.text) == ("forgotten", JOB, "forgotten: it was over for 7.0 days")
    world.workers.clear()
    world.start()
    assert world.phase is JobPhase.RUNNING
    assert world.job.number == 1


def test_a_later_leader_counts_from_the_end() -> None:
    done = Stored(job=JOB, done=DoneRecord(step=5, epoch=1, at=1.0), over_seconds=WEEK - 10)
    state = machine.takeover(7, [done], JobSettings(), 1000.0)
    state, effects = machine.step(state, CoordinatorTick(), 1005.0)
    assert effects == ()
    state, effects = machine.step(state, CoordinatorTick(), 1011.0)
    assert [effect.forget for effect in effects if isinstance(effect, Write)] == [True]
    assert state.jobs == {}


def test_a_tick_looks_at_no_job_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept for a week, two thousand of them if need be, and there are ten ticks a second."""
    over = [Stored(job=f"j{n:04}", done=DoneRecord(step=n, epoch=1)) for n in range(2000)]
    state = machine.takeover(7, over, JobSettings(keep_jobs=2000), 1000.0)
    live = {name: fresh(name, JobPhase.GATHERING, 1000.0) for name in ("one", "two")}
    state = msgspec.structs.replace(state, jobs={**state.jobs, **live})
    stepped: list[str] = []
    step = machine.machine.step

    def counted(job: JobState, *given: Any) -> Any:
        stepped.append(job.job)
        return step(job, *given)

    monkeypatch.setattr(machine.machine, "step", counted)
    for at in range(10):
        state, _ = machine.step(state, CoordinatorTick(), 1000.0 + at / 10)
    assert stepped == ["one", "two"] * 10
    assert len(state.jobs) == 2002


def test_of_more_than_may_be_kept_the_oldest_go_a_few_at_a_time() -> None:
    settings = JobSettings(keep_jobs=3)
    over = [Stored(job=f"j{n:02}", done=DoneRecord(step=n, epoch=1), over_seconds=n) for n in range(20)]
    state = machine.takeover(7, over, settings, 1000.0)
    live = fresh("old", JobPhase.ASSEMBLING, 0.0)
    state = msgspec.structs.replace(state, jobs={**state.jobs, "old": live})
    state, effects = machine.step(state, CoordinatorTick(), 1001.0)
    assert len([effect for effect in effects if isinstance(effect, Write)]) == finished_jobs.AT_ONCE
    for _ in range(5):
        state, effects = machine.step(state, CoordinatorTick(), 1001.0)
    assert sorted(state.jobs) == ["j00", "j01", "j02", "old"]
    assert effects == ()


@pytest.mark.parametrize("phase", sorted(LIVE | {JobPhase.GATHERING}, key=lambda phase: phase.value))
def test_job_that_lives_is_not_forgotten(phase: JobPhase) -> None:
    job = fresh(JOB, phase, 0.0)
    assert f"end it first, with 'elasticd stop {JOB}'" in finished_jobs.refusal(job, {})
    assert finished_jobs.asked({JOB: job}, {}, ForgetAsked(job=JOB, by="alice")) is None
    assert finished_jobs.due({JOB: job}, {}, JobSettings(keep_jobs=0, keep_seconds=0), 500.0) is None


def test_user_has_it_forgotten_once_its_workers_have_ended() -> None:
    world = running()
    world.finish()
    world.settle()
    before = kept(world)
    ask(world)
    assert world.phase is JobPhase.DONE
    assert kept(world) == before
    assert "has not ended yet" in finished_jobs.refusal(world.job, world.state.nodes)
    world.tick(10 * WEEK)
    assert JOB in world.state.jobs, "nor does time forget it then"
    ended(world)
    ask(world)
    assert kept(world) == []
    assert world.notes[-1].text == "forgotten: alice wants it"


def test_worker_that_outlives_a_leader_is_waited_for() -> None:
    world = running()
    world.finish()
    world.settle()
    world.new_leader()
    world.settle()
    assert world.phase is JobPhase.DONE
    assert finished_jobs.living(world.job, world.state.nodes) == sorted(world.workers)
    ended(world)
    assert finished_jobs.refusal(world.job, world.state.nodes) == ""


def test_node_that_is_gone_or_came_back_without_its_worker_holds_nothing_up() -> None:
    for event in (AgentDown(node="beta"), AgentUp(record=node_record("beta"))):
        world = running()
        world.finish()
        world.settle()
        for worker in [worker for worker in world.workers.values() if worker.node == "alpha"]:
            world.leave_cleanly(worker.device, "over")
        world.say(AgentDown(node="beta"))
        world.say(event)
        world.settle()
        assert finished_jobs.refusal(world.job, world.state.nodes) == ""


def test_record_of_a_node_that_changes_leaves_its_workers_known() -> None:
    world = running()
    world.finish()
    world.settle()
    record = msgspec.structs.replace(world.records["beta"], draining=True)
    world.say(AgentUp(record=record))
    world.settle()
    assert finished_jobs.living(world.job, world.state.nodes) == sorted(world.workers)


def test_stopped_job_is_forgotten_too_and_words_about_it_change_nothing() -> None:
    world = started()
    world.kill("beta/1")
    world.settle()
    assert world.phase in OVER
    for device in [device for device, worker in world.workers.items() if worker.alive]:
        world.leave_cleanly(device, "over")
    world.settle()
    ask(world)
    assert kept(world) == []
    worker = world.workers["beta/1"]
    lost: WorkerLost = world.lost(worker)
    world.say(ForgetAsked(job=JOB, by="alice"))
    world.say(Received(node="beta", message=lost))
    world.tick()
    assert world.state.jobs == {}
    assert kept(world) == []


def test_job_that_nobody_waits_for_any_more_before_it_began_is_forgotten() -> None:
    world = World()
    world.join("alpha")
    world.settle()
    world.tick(800)
    assert world.phase is JobPhase.GATHERING, "its torchrun waits for another node"
    world.leave("alpha")
    world.tick()
    assert world.state.jobs == {}
    world.join("alpha")
    world.tick(10)
    world.disconnect("alpha")
    world.tick(10)
    assert JOB in world.state.jobs, "the agent may only be starting again"
    world.tick(600)
    assert JOB not in world.state.jobs


def test_torchruns_of_one_node_leave_room_for_the_jobs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_JOBS", 40)
    world = World()

    def joins(node: str, job: str) -> bool:
        body = Join(job=job, min_nodes=2, max_nodes=2, pid=3)
        up = FromClient(client=f"t{node}{job}", job=job, device="", incarnation="", body=body)
        world.say(Received(node=node, message=up))
        world.settle()
        return job in world.state.jobs

    mine = [joins("alpha", f"a{number}") for number in range(60)]
    assert sum(mine) == len(world.records["alpha"].devices) + machine.MOST_BEGUN
    (refused,) = world.told["talphaa59"]
    assert isinstance(refused, Rejected)
    assert "node alpha has torchruns in 18 jobs that have not begun" in refused.reason
    others = [joins("beta", f"b{number}") for number in range(60)]
    assert 0 < sum(others) < len(others), "what was left to it, and not all of that"
    assert len(world.state.jobs) < machine.MOST_JOBS
    world.tick()
    assert joins("alpha", "a0"), "of a job that there is nothing is refused"


def test_jobs_of_one_node_that_are_over_leave_room_for_the_jobs_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "MOST_JOBS", 40)
    world = World()
    for number in range(60):
        job = f"a{number}"
        body = Join(job=job, min_nodes=2, max_nodes=2, pid=3)
        up = FromClient(client=f"t{job}", job=job, device="", incarnation="", body=body)
        world.say(Received(node="alpha", message=up))
        world.settle()
        over = {
            n: msgspec.structs.replace(each, phase=JobPhase.STOPPED) for n, each in world.state.jobs.items()
        }
        world.state = msgspec.structs.replace(world.state, jobs=over)
    assert len(world.state.jobs) == machine.MOST_JOBS / 2
    world.join("beta")
    world.settle()
    assert JOB in world.state.jobs


def test_jobs_that_a_leader_knows_are_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_JOBS", 1)
    world = running()
    body = Join(job="another", min_nodes=1, max_nodes=1, pid=3)
    world.say(
        Received(
            node="alpha", message=FromClient(client="t9", job="another", device="", incarnation="", body=body)
        )
    )
    world.settle()
    assert "another" not in world.state.jobs
    (refused,) = world.told["t9"]
    assert isinstance(refused, Rejected)
    assert "has 1 jobs already" in refused.reason
