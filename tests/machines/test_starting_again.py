"""Jobs whose script fails before the first plan, makes no Job, or is started again after the end."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.spec.cluster import Device

from elasticd.machines.coordinator import finished_jobs, machine
from elasticd.machines.job.state.events import (
    AgentUp,
    CoordinatorNote,
    CoordinatorSend,
    Effect,
    Received,
    StopAsked,
    Write,
)
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, JobState, stranger
from elasticd.records import HistoryRecord, NodeRecord, decode
from elasticd.wire.coordinator import FromClient, ToClient
from elasticd.wire.rendezvous import Join, Joined, Leave, WorkerFailure
from elasticd.wire.worker import Closed, Rejected
from tests.machines.cast import JOB
from tests.machines.checked import KEYS
from tests.machines.test_coordinator_lives import started
from tests.machines.test_recovery import running
from tests.machines.world import World

KEY_ERROR = WorkerFailure(kind="KeyError", text="'inputs'", traceback="Traceback ...", code=1)
KILLED = WorkerFailure(text="ended by signal SIGKILL", code=-9)
REFUSED = WorkerFailure(text="global_batch 7 does not divide", code=1, refusal=True)


class Leader:
    """A coordinator's machine, and the torchruns of one node of two devices, one for each."""

    def __init__(self) -> None:
        self.state = machine.takeover(1, (), JobSettings(gather_seconds=0.0), 0.0)
        self.now = 0.0
        self.effects: list[Effect] = []
        devices = tuple(Device(name=f"a/{slot}", memory=1 << 30) for slot in range(2))
        record = NodeRecord(node="a", devices=devices, address="h", agent="one")
        self._do(AgentUp(record=record))

    def _do(self, event: AgentUp | Received) -> None:
        self.now += 1.0
        self.state, effects = machine.step(self.state, event, self.now)
        self.effects += effects

    def say(self, slot: int, body: Join | Leave) -> None:
        up = FromClient(client=f"t{slot}", job="j", device="", incarnation="", body=body)
        self._do(Received(node="a", message=up))

    def join(
        self, slot: int, *, age: float = 0.5, failure: WorkerFailure | None = None, fresh: bool = False
    ) -> None:
        join = Join(job="j", min_nodes=2, max_nodes=2, pid=7 + slot, slot=slot, failure=failure)
        self.say(slot, msgspec.structs.replace(join, age=age, fresh=fresh))

    def begin(self, age: float = 0.5, *, fresh: bool = False) -> None:
        for slot in range(2):
            self.join(slot, age=age, fresh=fresh)

    @property
    def job(self) -> JobState:
        return self.state.jobs["j"]

    def answers(self, slot: int) -> list[object]:
        messages = [effect.message for effect in self.effects if isinstance(effect, CoordinatorSend)]
        return [told.body for told in messages if isinstance(told, ToClient) and told.client == f"t{slot}"]

    def kinds(self) -> list[str]:
        told = [effect for effect in self.effects if isinstance(effect, CoordinatorNote)]
        told += [note for effect in self.effects if isinstance(effect, Write) for note in effect.notes]
        return [note.kind for note in told]


def begun() -> Leader:
    leader = Leader()
    leader.begin()
    assert leader.job.phase is JobPhase.ASSEMBLING
    return leader


@pytest.mark.parametrize("second", [0, 1])
def test_same_exception_twice_ends_the_job_whether_on_one_device_or_on_two(second: int) -> None:
    leader = begun()
    leader.join(0, failure=KEY_ERROR)
    assert isinstance(leader.answers(0)[-1], Joined), "once it may be chance: the worker is started again"
    leader.join(second, failure=msgspec.structs.replace(KEY_ERROR, traceback="another"))
    assert leader.job.phase is JobPhase.STOPPED
    assert "KeyError: 'inputs'" in leader.job.reason
    answer = leader.answers(second)[-1]
    assert isinstance(answer, Rejected)
    assert "KeyError: 'inputs'" in answer.reason
    assert leader.job.ending.thrown[-1].traceback == "another"


def test_another_exception_or_a_killed_worker_does_not_end_the_job() -> None:
    leader = begun()
    leader.join(0, failure=KEY_ERROR)
    for failure in (msgspec.structs.replace(KEY_ERROR, text="'labels'"), KILLED, KILLED, KILLED):
        leader.join(1, failure=failure)
        assert leader.job.phase is JobPhase.ASSEMBLING


def test_refusal_ends_the_job_at_once_with_its_own_words() -> None:
    leader = begun()
    leader.say(1, Leave(job="j", failure=REFUSED))
    assert leader.job.phase is JobPhase.STOPPED
    assert leader.job.reason.startswith("global_batch 7 does not divide")


def test_script_without_a_job_is_no_job_of_the_live_mode() -> None:
    leader = begun()
    leader.say(0, Leave(job="j", how="restart"))
    assert "j" not in leader.state.jobs
    assert leader.kinds()[-1] == "restart_mode"
    leader.say(1, Leave(job="j", how="restart"))
    assert "j" not in leader.state.jobs
    assert leader.kinds().count("restart_mode") == 1


def test_job_that_trains_is_not_forgotten_whatever_a_torchrun_says() -> None:
    world = started()
    up = FromClient(
        client="talpha", job="demo", device="", incarnation="", body=Leave(job="demo", how="restart")
    )
    world.say(Received(node="alpha", message=up))
    world.settle()
    assert world.phase is JobPhase.RUNNING


def test_scripts_that_end_well_without_a_job_leave_the_others_alone_and_are_told_of_at_the_last() -> None:
    leader = begun()
    leader.say(0, Leave(job="j", how="finished"))
    assert leader.job.phase is JobPhase.ASSEMBLING, "the other one may have hours of work left"
    leader.say(1, Leave(job="j", how="finished"))
    assert leader.job.phase is JobPhase.STOPPED
    assert "exit code 0 before a first step" in leader.job.reason


def test_job_that_stopped_is_started_again_by_who_started_after_its_end_and_by_nobody_else() -> None:
    leader = begun()
    leader.say(1, Leave(job="j", failure=REFUSED))
    leader.join(0, age=3600.0)  # of the same start, come late
    answer = leader.answers(0)[-1]
    assert isinstance(answer, Rejected)
    assert "global_batch 7" in answer.reason
    assert leader.job.phase is JobPhase.STOPPED
    leader.join(0, age=0.1, failure=KILLED)  # a torchrun of the last start, whose worker failed since
    assert leader.job.phase is JobPhase.STOPPED
    leader.begin(age=0.1)
    assert leader.job.phase is JobPhase.ASSEMBLING
    assert leader.kinds().count("started_again") == 1
    assert leader.job.ending.thrown == ()


def test_job_that_finished_is_started_again_by_fresh_alone_and_its_numbers_go_on() -> None:
    leader = begun()
    over = msgspec.structs.replace(leader.job, phase=JobPhase.DONE, since=leader.now, highest=7)
    leader.state = msgspec.structs.replace(leader.state, jobs={"j": over})
    leader.join(0, age=0.1)
    assert isinstance(leader.answers(0)[-1], Closed)
    assert "--fresh" in leader.answers(0)[-1].reason
    leader.begin(age=0.1, fresh=True)
    assert (leader.job.phase, leader.job.highest, leader.job.start.fresh) == (JobPhase.ASSEMBLING, 7, True)


def test_job_whose_worker_lives_on_is_started_again_once_that_has_ended() -> None:
    leader = begun()
    leader.say(1, Leave(job="j", failure=REFUSED))
    living = msgspec.structs.replace(leader.job, workers={"a/0": stranger("a/0", "one")})
    leader.state = msgspec.structs.replace(leader.state, jobs={"j": living})
    leader.join(0, age=0.1)
    answer = leader.answers(0)[-1]
    assert isinstance(answer, Rejected)
    assert answer.later
    assert "a/0 has not ended yet" in answer.reason
    ended = msgspec.structs.replace(living, workers={})
    leader.state = msgspec.structs.replace(leader.state, jobs={"j": ended})
    leader.begin(age=1.5)
    assert leader.job.phase is JobPhase.ASSEMBLING


# -- over leaders ----------------------------------------------------------------------------------------------


def over(world: World) -> World:
    """The job was stopped, and its workers' processes have ended."""
    world.say(StopAsked(job=JOB, by="alice", seconds=0.0))
    world.settle()
    for device in list(world.workers):
        world.leave_cleanly(device, "the job is over")
    world.settle()
    world.workers.clear()
    world.joined.clear()
    world.joins.clear()
    return world


def asked_again(world: World, node: str) -> None:
    join = Join(job=JOB, min_nodes=len(world.records), max_nodes=len(world.records), pid=8, age=0.0)
    world.now += 1.0
    world.joins[node] = join
    world._join(node)
    world.settle()


@pytest.mark.parametrize("when", ["before", "between", "after", "never"])
def test_numbers_and_history_go_on_over_a_new_start_whenever_the_leader_changes(when: str) -> None:
    world = over(running())
    last = world.job.highest
    assert world.phase is JobPhase.STOPPED
    first, *others = world.records
    if when == "before":
        world.new_leader()
    asked_again(world, first)
    assert world.phase is JobPhase.GATHERING
    if when == "between":
        world.new_leader()
        world.settle()
    for node in others:
        asked_again(world, node)
    if when == "after":
        world.new_leader()
        world.settle()
    world.train(1)
    assert world.phase is JobPhase.RUNNING
    assert world.job.number > last
    records = [
        decode(item.value, HistoryRecord) for item in world.store.snapshot(KEYS.job(JOB, "history/")).items
    ]
    assert [record.number for record in records] == [*range(1, last + 1), world.job.number]
    assert records[-1].reason.startswith("the job was started again: ")
    assert not records[0].reason.startswith("the job was started again: ")


def test_history_of_a_job_that_was_started_again_and_never_gathered_is_forgotten_in_time() -> None:
    world = over(running())
    asked_again(world, next(iter(world.records)))
    world.leave(next(iter(world.records)))
    world.new_leader()
    world.settle()
    assert world.phase is JobPhase.GATHERING
    world.tick(finished_jobs.EMPTY_SECONDS + 1)
    world.settle()
    assert JOB not in world.state.jobs
    assert [*world.store.snapshot(KEYS.jobs).items] == []
    assert world.notes[-1].kind == "forgotten"
