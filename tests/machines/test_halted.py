"""Main threads that hang: the member that all others wait for is found and fenced off, and nobody else."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.faults.hangs import MOST_STACK, awaited
from elasticd.machines.job.state.events import AgentUp, Received
from elasticd.machines.job.state.job_state import JobPhase, JobSettings
from elasticd.wire.main_thread import Halted
from elasticd.wire.worker import Saved
from tests.machines.cast import JOB, node_record
from tests.machines.test_draining import members
from tests.machines.test_recovery import ROOM, recovered, running
from tests.machines.world import World

#: As an agent tells of a computation in the first two steps under a plan.
FIRST_STEPS = "the forward pass (in its plan's first steps)"
STACK = 'File "train.py", line 9 in loss'
OTHERS = ("alpha/0", "alpha/1", "beta/0")


def told(world: World, device: str, **changes: object) -> Halted:
    worker = world.workers[device]
    found = Halted(job=JOB, device=device, incarnation=worker.incarnation)
    return msgspec.structs.replace(found, **changes)


def say(world: World, message: Halted) -> None:
    world.say(Received(node=node_of(message.device), message=message))


def hangs(world: World, device: str, seconds: float = 3.0) -> None:
    """In its loss: it hears of nothing any more."""
    place = {"place": "the loss", "step": world.steps, "computes": True, "seconds": seconds, "stack": STACK}
    world.deaf.add(device)
    say(world, told(world, device, **place))


def waits(world: World, *devices: str) -> None:
    for device in devices:
        place = {"place": "the vote", "step": world.steps, "rank": 3, "waits": True, "seconds": 1.0}
        say(world, told(world, device, **place))


def outside(world: World, device: str, seconds: float = 2.0, place: str = "its script's own code") -> None:
    say(world, told(world, device, place=place, seconds=seconds))


def moves(world: World, device: str) -> None:
    world.deaf.discard(device)
    say(world, told(world, device))


def pass_time(world: World, seconds: float = 5.0) -> None:
    world.settle()
    for _ in range(int(seconds / 0.25)):
        world.tick(0.25)


def test_the_one_that_all_others_wait_for_is_fenced_off_with_its_stack_in_the_event() -> None:
    world = running()
    hangs(world, "beta/1")
    waits(world, *OTHERS)
    pass_time(world, 3.0)
    assert recovered(world)
    assert "beta/1" not in members(world)
    assert {*world.job.losses.gone} == {"beta/1"}
    (note,) = [note for note in world.notes if note.kind == "halted"]
    assert (note.data["device"], note.data["stack"]) == ("beta/1", STACK)
    fenced = next(note.text for note in world.notes if note.kind == "fenced")
    assert "worker beta/1 stands still in the loss of step" in fenced
    assert "while alpha/0 (in the vote" in fenced
    world.train(3)
    assert world.phase is JobPhase.RUNNING


def test_two_of_four_that_hang_are_both_fenced_off() -> None:
    world = running()
    hangs(world, "beta/0")
    hangs(world, "beta/1")
    waits(world, "alpha/0", "alpha/1")
    pass_time(world)
    assert recovered(world)
    assert members(world) <= {"alpha/0", "alpha/1"}


@pytest.mark.parametrize("hang", [False, True])
def test_one_that_alone_holds_a_part_of_the_state_is_waited_for(hang: bool) -> None:
    """A long sequence after many short ones looks like a hang: the job ended, its state lost."""
    world = running(memory=2_600_000)  # all four are needed
    hangs(world, "beta/1")
    waits(world, *OTHERS)
    pass_time(world, 30.0)
    assert world.phase is JobPhase.RUNNING, world.job.reason
    assert "beta/1 stands still in the loss" in world.job.reason
    assert "they are waited for, as nobody else holds" in world.job.reason
    assert world.kinds().count("halted") == world.kinds().count("waiting") == 1
    if hang:
        world.kill("beta/1")
        pass_time(world)
        assert world.phase is JobPhase.STOPPED
        return
    for device in (*OTHERS, "beta/1"):
        moves(world, device)
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    assert world.job.reason == ""
    assert "fenced" not in world.kinds()


def kept(world: World) -> None:
    """Nobody is fenced off, and what the status and the events say of why does not change."""
    before = world.plan()
    pass_time(world, 60.0)
    assert world.plan() == before
    assert "fenced" not in world.kinds()


def test_what_befalls_most_of_a_job_is_no_fault_of_its_devices_and_is_said() -> None:
    world = running()
    for device in OTHERS:
        hangs(world, device)
    waits(world, "beta/1")
    pass_time(world, 3.0)
    assert awaited(world.job, world.now) == "", "a step may well take some seconds longer once"
    assert "waiting" not in world.kinds()
    kept(world)
    said = awaited(world.job, world.now)
    assert said.startswith("waits for worker alpha/0, which is in the loss for 6")
    assert said.endswith("; no device is given up for it, since most of the job's stand still")
    (waiting,) = [note.text for note in world.notes if note.kind == "waiting"]
    assert waiting.startswith("waiting: waits for worker alpha/0, which is in the loss for 1")
    found = [note for note in world.notes if note.kind == "halted"]
    assert [note.data["device"] for note in found] == [*OTHERS]
    assert {note.data["stack"] for note in found} == {STACK}
    for note in found:
        assert note.text.endswith(", while beta/1 (in the vote from beta/1) waits")
    for device in (*OTHERS, "beta/1"):
        moves(world, device)
    world.train(2)
    assert world.phase is JobPhase.RUNNING
    assert awaited(world.job, world.now) == ""
    for device in (*OTHERS, "beta/1"):
        hangs(world, device)
    kept(world)
    assert world.kinds().count("waiting") == 2, "of another step it is said again"


@pytest.mark.parametrize("limit", [0.0, 50.0])
def test_most_of_a_job_that_is_outside_for_longer_than_the_limit_is_not_given_up_and_that_is_said(
    limit: float,
) -> None:
    """A shared file system that hangs has all loaders stand still."""
    world = running()
    world.state = msgspec.structs.replace(world.state, settings=limited(limit))
    for device in OTHERS:
        outside(world, device, place="its loader")
    waits(world, "beta/1")
    kept(world)
    said = awaited(world.job, world.now, limit)
    assert said.startswith("waits for worker alpha/0, which is in its loader for 6")
    assert said.endswith("since most of the job's stand still") == (limit > 0)
    assert world.kinds().count("waiting") == (limit > 0), "without a limit nobody knows how long it may take"
    assert world.kinds().count("halted") == 3 * (limit > 0)


def test_a_jobs_only_device_that_hangs_is_not_given_up_and_that_is_said() -> None:
    world = World(("alpha",), memory=ROOM)
    world.records["alpha"] = node_record("alpha", devices=1, memory=ROOM)
    world.start()
    world.settle()
    world.train(2)
    hangs(world, "alpha/0")
    kept(world)
    assert world.phase is JobPhase.RUNNING
    assert awaited(world.job, world.now).endswith("; it is the job's only device, and is not given up for it")
    (found,) = [note for note in world.notes if note.kind == "halted"]
    assert (found.data["device"], found.data["stack"]) == ("alpha/0", STACK)
    assert "while" not in found.text


def beside_an_idle_one(*, copy: bool = True, limit: float = 50.0) -> World:
    """A job of one device, and a worker that has come since and stands by."""
    world = World(("alpha",), memory=ROOM)
    world.records["alpha"] = node_record("alpha", devices=1, memory=ROOM)
    world.start()
    world.settle()
    world.train(4)
    if copy:
        world.up("alpha/0", Saved(name="step-4", step=world.steps, plan=1))
    world.records["beta"] = node_record("beta", devices=1, memory=ROOM)
    world.say(AgentUp(record=world.records["beta"]))
    world.planner_waits = True
    world.join("beta", 1, 2)
    world.train(2)
    world.state = msgspec.structs.replace(world.state, settings=limited(limit))
    assert {*world.job.workers} == {"alpha/0", "beta/0"}
    return world


def test_a_jobs_only_device_that_hangs_beside_an_idle_one_is_given_up_for_it_beyond_the_limit() -> None:
    world = beside_an_idle_one()
    hangs(world, "alpha/0")
    pass_time(world, 40.0)
    assert world.phase is JobPhase.RUNNING
    pass_time(world, 20.0)
    assert world.phase is JobPhase.RECOVERING
    world.planner_waits = False
    pass_time(world, 40.0)
    assert world.phase is JobPhase.RUNNING, world.job.reason
    assert members(world) == {"beta/0"}
    assert world.proposals[-1].checkpoints == ("step-4",)
    step = world.job.steps.progress.step
    hangs(world, "beta/0")
    world.deaf.discard("alpha/0")
    pass_time(world, 300.0)
    assert (world.phase, world.job.steps.progress.step) == (JobPhase.RUNNING, step), "no device is to blame"


@pytest.mark.parametrize("lacking", ["a copy", "a limit"])
def test_it_is_waited_for_without_a_copy_or_a_limit(lacking: str) -> None:
    world = beside_an_idle_one(copy=lacking != "a copy", limit=0.0 if lacking == "a limit" else 50.0)
    hangs(world, "alpha/0")
    pass_time(world, 200.0)
    assert world.phase is JobPhase.RUNNING
    assert "alpha/0" in awaited(world.job, world.now)


def test_a_hang_beside_one_that_is_outside_of_a_step_is_said() -> None:
    """Nobody is to blame while a single one is somewhere else; both are named meanwhile."""
    world = running()
    hangs(world, "beta/1")
    outside(world, "beta/0", 500.0, place="its loader")
    waits(world, "alpha/0", "alpha/1")
    kept(world)
    said = awaited(world.job, world.now)
    assert said.startswith("waits for worker beta/0, which is in its loader for 5")
    assert "; worker beta/1, which is in the loss for 6" in said
    assert [note.data["device"] for note in world.notes if note.kind == "halted"] == ["beta/1"]
    assert world.kinds().count("waiting") == 1


def test_all_that_wait_for_one_another_are_nobodys_fault_and_it_is_said() -> None:
    world = running()
    waits(world, *OTHERS)
    pass_time(world, 60.0)
    waits(world, "beta/1")
    world.settle()
    assert awaited(world.job, world.now) == "", "they wait for one another for a second"
    kept(world)
    said = awaited(world.job, world.now)
    assert said.startswith("its workers wait for one another: alpha/0 (in the vote from beta/1), ")
    assert said.endswith(" and 1 more")


@pytest.mark.parametrize("who", ["silent", "computes", "outside"])
def test_nobody_is_to_blame_while_a_single_one_is_somewhere_else(who: str) -> None:
    world = running()
    hangs(world, "beta/1")
    waits(world, "alpha/0", "alpha/1")
    if who == "outside":
        outside(world, "beta/0", 500.0)
    elif who == "computes":
        waits(world, "beta/0")
        moves(world, "beta/0")
    pass_time(world, 30.0)
    assert "fenced" not in world.kinds()
    waits(world, "beta/0")
    pass_time(world)
    assert recovered(world)
    assert "beta/1" not in members(world)


def test_as_long_as_the_job_makes_steps_nobody_hangs() -> None:
    """An old word, or a false one."""
    world = running()
    hangs(world, "beta/1")
    waits(world, *OTHERS)
    for _ in range(20):
        world.train(1)
        assert "fenced" not in world.kinds()


@pytest.mark.parametrize("turns", range(8))
def test_one_that_moves_again_just_as_it_is_found_stays_or_comes_again(turns: int) -> None:
    world = running()
    hangs(world, "beta/1")
    waits(world, *OTHERS)
    for _ in range(turns):
        if world.inbox:
            world.turn()
    moves(world, "beta/1")
    pass_time(world)
    assert world.phase is JobPhase.RUNNING
    if "fenced" in world.kinds():
        world.thaw("beta/1")
        world.settle()
        assert world.workers["beta/1"].incarnation.endswith("+"), "a new incarnation, which stands by"
    else:
        assert "beta/1" in members(world)
    world.train(2)
    assert world.phase is JobPhase.RUNNING


@pytest.mark.parametrize("said_again", [True, False])
def test_a_new_leader_finds_it_once_the_agents_have_said_it_again(said_again: bool) -> None:
    world = running()
    hangs(world, "beta/1")
    waits(world, *OTHERS)
    world.inbox.clear()
    world.new_leader()
    if said_again:
        hangs(world, "beta/1")
        waits(world, *OTHERS)
    pass_time(world, 20.0)
    assert recovered(world) or not said_again
    assert ("beta/1" in members(world)) != said_again


def test_the_scripts_own_code_has_all_the_time_unless_a_limit_is_set() -> None:
    for limit, expected in ((0.0, False), (100.0, False), (50.0, True)):
        settings = JobSettings(prepare_seconds=10.0, retry_seconds=5.0)
        detect = msgspec.structs.replace(settings.detect, outside_seconds=limit)
        world = World(settings=msgspec.structs.replace(settings, detect=detect), memory=60_000_000)
        world.start()
        world.settle()
        world.train(2)
        outside(world, "beta/1")
        waits(world, *OTHERS)
        world.deaf.add("beta/1")
        pass_time(world, 60.0)
        assert ("fenced" in world.kinds()) == expected, limit


def test_a_fence_waits_for_one_that_is_in_its_scripts_own_code() -> None:
    """A save of a minute while another member dies: it answers late, and is no loss."""
    world = running()
    outside(world, "beta/0")
    world.deaf.add("beta/0")
    world.kill("beta/1")
    pass_time(world, 60.0)
    assert world.phase is JobPhase.RECOVERING
    assert "beta/0 (in its script's own code) answers the fence once it is out of there" in world.job.reason
    assert {*world.job.losses.gone} == {"beta/1"}
    moves(world, "beta/0")
    world.thaw("beta/0")
    pass_time(world)
    assert recovered(world)
    assert "beta/0" in world.job.workers
    assert {*world.job.losses.gone} == {"beta/1"}


@pytest.mark.parametrize("how", ["frozen", "limit", "unknown"])
def test_it_does_not_wait_for_one_that_is_frozen_or_beyond_the_limit(how: str) -> None:
    world = running()
    if how == "limit":
        detect = msgspec.structs.replace(world.settings.detect, outside_seconds=30.0)
        settings = msgspec.structs.replace(world.settings, detect=detect)
        world.state = msgspec.structs.replace(world.state, settings=settings)
    if how != "unknown":
        outside(world, "beta/0")
    if how == "frozen":
        from tests.machines.test_frozen import freeze

        freeze(world, "beta/0")
    world.deaf.add("beta/0")
    world.kill("beta/1")
    pass_time(world, 60.0)
    assert recovered(world), world.job.reason
    assert {*world.job.losses.gone} == {"beta/0", "beta/1"}


def test_another_incarnations_halt_means_nothing_and_what_is_kept_is_bounded() -> None:
    world = running()
    say(world, told(world, "beta/1", incarnation="one before", place="the loss", computes=True))
    world.settle()
    assert world.job.workers["beta/1"].halted is None
    say(world, told(world, "beta/1", place="p" * 9999, stack="s" * 99999, seconds=-5.0))
    world.settle()
    halted = world.job.workers["beta/1"].halted
    assert halted is not None
    assert len(halted.place) < 100
    assert len(halted.stack) == MOST_STACK
    assert world.job.workers["beta/1"].halted_at == world.now


@pytest.mark.parametrize("limit", [0.0, 50.0])
def test_a_plans_first_steps_have_all_the_time_unless_a_limit_is_set(limit: float) -> None:
    """Beyond the limit, and what two steps of the plan are expected to take."""
    world = running()
    plan, detect = world.plan(), msgspec.structs.replace(world.settings.detect, outside_seconds=limit)
    assert plan is not None
    assert plan.prediction is not None
    prediction = msgspec.structs.replace(plan.prediction, step_seconds=20.0)
    job = msgspec.structs.replace(world.job, plan=plan.replace(prediction=prediction))
    settings = msgspec.structs.replace(world.settings, detect=detect)
    world.state = msgspec.structs.replace(world.state, settings=settings, jobs={JOB: job})
    say(world, told(world, "beta/1", place=FIRST_STEPS, step=world.steps, seconds=2.0))
    waits(world, *OTHERS)
    world.deaf.add("beta/1")
    pass_time(world, 85.0)
    assert "fenced" not in world.kinds()
    assert awaited(world.job, world.now).startswith(f"waits for worker beta/1, which is in {FIRST_STEPS} for 8")
    pass_time(world, 10.0)
    assert ("fenced" in world.kinds()) == (limit > 0)


def test_a_fence_waits_for_a_plans_first_steps() -> None:
    """A first compilation of minutes while another member dies."""
    world = running()
    say(world, told(world, "beta/0", place=FIRST_STEPS, step=world.steps, seconds=2.0))
    world.deaf.add("beta/0")
    world.kill("beta/1")
    pass_time(world, 60.0)
    assert world.phase is JobPhase.RECOVERING
    assert f"beta/0 (in {FIRST_STEPS}) answers the fence" in world.job.reason
    moves(world, "beta/0")
    world.thaw("beta/0")
    pass_time(world)
    assert recovered(world)
    assert {*world.job.losses.gone} == {"beta/1"}


# -- in a switch -----------------------------------------------------------------------------------------------

FACTORY = "the optimizer's factory"


def limited(seconds: float) -> JobSettings:
    settings = JobSettings(prepare_seconds=10.0, retry_seconds=5.0)
    detect = msgspec.structs.replace(settings.detect, outside_seconds=seconds)
    return msgspec.structs.replace(settings, detect=detect)


def starting(settings: JobSettings) -> World:
    """All have prepared the first plan, and move to it."""
    world = World(settings=settings, memory=ROOM)
    for name in world.records:
        world.join(name)
    world.settle()
    assert (world.phase, world.plan()) == (JobPhase.PROPOSED, None)
    return world


def joining(settings: JobSettings) -> World:
    """The plan in force goes on without beta/1, which the next one takes up again."""
    world = World(settings=settings, memory=ROOM)
    world.start()
    world.train(2)
    hangs(world, "beta/1")
    waits(world, *OTHERS)
    pass_time(world)
    for device in OTHERS:
        moves(world, device)
    world.deaf.discard("beta/1")
    world.thaw("beta/1")
    world.settle()
    while world.phase is not JobPhase.PROPOSED:
        world.train(1)
    plan = world.plan()
    assert plan is not None
    assert "beta/1" not in plan.members
    return world


def recovering(settings: JobSettings) -> World:
    """alpha/1 died; the others have prepared the plan without it."""
    world = World(settings=settings, memory=ROOM)
    world.start()
    world.train(2)
    vote, world._vote = world._vote, lambda: None  # type: ignore[method-assign]
    world.kill("alpha/1")
    world.settle()
    assert world.phase is JobPhase.PROPOSED
    world._vote = vote  # type: ignore[method-assign]
    return world


@pytest.mark.parametrize("switch", [starting, joining, recovering])
@pytest.mark.parametrize("limit", [0.0, 50.0])
def test_one_that_a_switch_waits_for_is_told_and_has_the_time_that_is_set(
    switch: Callable[[JobSettings], World], limit: float
) -> None:
    world = switch(limited(limit))
    others = [device for device in OTHERS if world.workers[device].alive]
    world.deaf.add("beta/1")
    outside(world, "beta/1", place=FACTORY)
    assert awaited(world.job, world.now) == ""
    waits(world, *others)
    fences = world.kinds().count("fenced")
    pass_time(world, 30.0)
    told_now = awaited(world.job, world.now)
    assert told_now.startswith(f"waits for worker beta/1, which is in {FACTORY} for 3")
    pass_time(world, 30.0)
    assert (world.kinds().count("fenced") > fences) == (limit > 0), "nobody knows how long it may take"
    if limit:
        why = next(note.text for note in reversed(world.notes) if note.kind == "fenced")
        assert f"worker beta/1 stands still in {FACTORY} for 5" in why
        for device in others:
            moves(world, device)
        for _ in range(5):
            world.train(1)
        assert recovered(world), world.job.reason
        assert "beta/1" not in members(world)


def test_a_job_is_not_said_to_wait_while_another_is_at_something_else_or_all_are() -> None:
    world = running()
    outside(world, "beta/1", seconds=60.0, place="the writing of the last checkpoint")
    waits(world, *OTHERS[1:])
    world.settle()
    assert awaited(world.job, world.now) == "", "alpha/0 is in its step"
    for device in OTHERS:
        outside(world, device, seconds=20.0, place="an evaluation")
    world.settle()
    said = awaited(world.job, world.now)
    assert said.startswith("waits for worker beta/1, which is in the writing of the last checkpoint for 60 s; ")
    assert said.endswith("in an evaluation for 20 s and 1 more")


def test_one_that_alone_holds_a_part_of_the_state_of_a_recovery_is_waited_for() -> None:
    world = World(settings=limited(50.0), memory=5_200_000)  # two copies of the state on four devices
    world.start()
    world.train(2)
    plan = world.plan()
    assert plan is not None
    vote, world._vote = world._vote, lambda: None  # type: ignore[method-assign]
    (gone, *rest) = plan.members
    world.kill(gone)
    world.settle()
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    stage = plan.places[gone].stage
    (alone,) = [device for device in rest if plan.places[device].stage == stage]
    outside(world, alone, place=FACTORY)
    world.deaf.add(alone)
    waits(world, *(device for device in rest if device != alone))
    pass_time(world, 100.0)
    assert "they are waited for, as nobody else holds" in world.job.reason
    moves(world, alone)
    world.deaf.clear()
    world._vote = vote  # type: ignore[method-assign]
    for _ in range(5):
        world.train(1)
    assert recovered(world), world.job.reason


def asks(world: World, device: str, task: str = "job.state_dict()", seconds: float = 1.0) -> None:
    """In a collective of what it asked for between two steps."""
    place = {"place": "a collective", "waits": True, "seconds": seconds, "task": task}
    say(world, told(world, device, **place))


def test_members_at_different_places_of_the_script_meet_again_under_the_plan_in_force() -> None:
    """`if job.rank == 0: job.state_dict()`: none of them is to blame, and none would ever go on."""
    world = running()
    asks(world, "alpha/0")
    waits(world, "alpha/1", "beta/0", "beta/1")
    pass_time(world, 8.0)
    assert world.job.losses.fence is None, "one may be about to come"
    pass_time(world, 4.0)
    assert recovered(world)
    assert len(members(world)) == 4
    assert world.job.losses.gone == {}
    fenced = next(note.text for note in world.notes if note.kind == "fenced")
    assert f"alpha/0 is in job.state_dict(), alpha/1 is in step {world.steps}: every member must call" in fenced


@pytest.mark.parametrize("also", ["all ask", "one is in its own code", "none asks"])
def test_members_that_can_come_together_are_left_alone(also: str) -> None:
    world = running()
    if also == "all ask":
        for device in (*OTHERS, "beta/1"):
            asks(world, device)
    elif also == "one is in its own code":
        asks(world, "alpha/0")
        waits(world, "alpha/1", "beta/0")
        outside(world, "beta/1")
    else:
        waits(world, *OTHERS, "beta/1")
    pass_time(world, 15.0)
    assert world.job.losses.fence is None


def test_two_different_tasks_are_different_places() -> None:
    world = running()
    asks(world, "alpha/0")
    for device in ("alpha/1", "beta/0", "beta/1"):
        asks(world, device, "job.evaluate()")
    pass_time(world, 12.0)
    assert recovered(world)
    assert len(members(world)) == 4
