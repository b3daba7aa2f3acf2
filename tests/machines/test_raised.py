"""Exceptions of the script's own code: tried on another device once, then the job ends with the text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.faults.user_exceptions import MOST_TRACEBACK, alike
from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import DoneRecord, Thrown
from elasticd.wire.worker import DrainNotice, Raised
from tests.machines.cast import FakeWorker
from tests.machines.test_draining import members
from tests.machines.test_recovery import recovered, running
from tests.machines.world import World

BAD = "bad sample 17 at 0x7f3a, of <object at 0x55aa>"


def throw(world: World, device: str, text: str = BAD, **changes: Any) -> Raised:
    """As a worker does whose code raises in the step that is under way."""
    worker = world.workers[device]
    body = Raised(
        plan=worker.plan,
        step=world.steps,
        kind="ValueError",
        text=text,
        traceback="Traceback\n  in loss\n",
        **{"holds": True, "saves": True, **changes},
    )
    world.outcome(worker, body)
    if body.holds:
        world.outcome(worker, DrainNotice(reason="its code raised ValueError"))
    return body


def saved(world: World, device: str) -> None:
    """All members of the plan have made a last checkpoint, and the one whose code raised says so."""
    worker = world.workers[device]
    body = next(body for body in worker.said if isinstance(body, Raised))
    world.outcome(worker, msgspec.structs.replace(body, plan=worker.plan, ends=True))
    world.settle()


def ended(world: World) -> str:
    assert world.phase is JobPhase.STOPPED, (world.phase, world.job.reason)
    done = world.done()
    assert isinstance(done, DoneRecord)
    return done.reason


SAVED = "the state is saved"


def test_the_others_make_the_step_again_and_its_state_is_of_use() -> None:
    world = running()
    throw(world, "beta/1")
    world.settle()
    assert recovered(world)
    assert "beta/1" not in members(world)
    proposal = world.proposals[-1]
    assert proposal.recovery is not None
    assert "beta/1" in proposal.recovery.sources, "it has what it had before the step"
    (note,) = [note for note in world.notes if note.kind == "raised"]
    assert note.text == f"the script's code raised ValueError: {BAD} (in step {world.steps}, on beta/1)"
    assert note.data["traceback"] == "Traceback\n  in loss\n"
    assert note.data["step"] == world.steps
    number = world.job.number
    world.kill("beta/1")
    world.train(3)
    assert world.kinds().count("fenced") == 1
    assert world.job.number == number
    assert world.phase is JobPhase.RUNNING


def test_one_in_the_midst_of_an_update_is_lost() -> None:
    world = running()
    throw(world, "beta/1", holds=False)
    world.settle()
    assert recovered(world)
    assert world.job.losses.gone == {"beta/1": "i0-beta/1"}


def test_the_same_on_another_device_ends_the_job_with_its_state_saved() -> None:
    world = running()
    throw(world, "beta/1")
    world.settle()
    world.kill("beta/1")
    world.settle()
    world.workers.pop("beta/1")
    before = members(world)
    throw(world, "alpha/0", text=BAD.replace("17", "18").replace("7f3a", "1b2c"))
    world.settle()
    assert world.phase is JobPhase.RUNNING
    assert members(world) == before, "no device after device: all of them save what they hold"
    assert {*world.job.losses.gone} <= {"beta/1"}
    saved(world, "alpha/0")
    reason = ended(world)
    assert "the script's code raised ValueError: bad sample 18" in reason
    assert "on alpha/0), as on beta/1 before; the state is saved" in reason


@pytest.mark.parametrize("steps", [1, 200])
def test_the_same_on_one_device_after_the_other_ends_the_job(steps: int) -> None:
    """A disk that is full where the first rank writes: each plan without it has another first rank."""
    world = running()
    for device in ("alpha/0", "alpha/1", "beta/0"):
        assert device in members(world)
        throw(world, device, text="No space left on device: /mnt/run7/step_0123")
        world.settle()
        if device == "beta/0":
            break
        assert device not in members(world)
        world.kill(device)
        world.settle()
        world.workers.pop(device)
        world.new_leader()
        for _ in range(6):
            world.tick(1.0)
        world.train(steps)
    assert bool(world.job.ending.failing) == (steps == 1)
    if steps == 1:
        saved(world, "beta/0")
        assert "on beta/0), as on alpha/1 before; the state" in ended(world)


def test_ranks_that_raise_at_once_end_the_job() -> None:
    world = running()
    throw(world, "beta/1")
    throw(world, "alpha/0")
    world.settle()
    assert world.phase is JobPhase.RUNNING
    assert {"alpha/0", "beta/1"} <= members(world)
    saved(world, "alpha/0")
    assert "as on beta/1 before" in ended(world)


@pytest.mark.parametrize(
    ("changes", "again"),
    [({}, True), ({"text": "bad sample 4 at 0x1"}, False), ({"kind": "OSError"}, False), ({"step": 9}, False)],
)
def test_another_exception_or_step_is_another_try(changes: dict[str, Any], again: bool) -> None:
    world = running()
    throw(world, "beta/1")
    world.settle()
    worker = world.workers["alpha/1"]
    body = next(body for body in world.workers["beta/1"].said if isinstance(body, Raised))
    other = msgspec.structs.replace(body, plan=worker.plan, **changes)
    thrown = Thrown(device="beta/1", step=body.step, kind=body.kind, text=body.text, traceback="")
    assert alike(thrown, other) == again
    world.outcome(worker, other)
    world.settle()
    assert bool(world.job.ending.failing) == again
    assert ("alpha/1" in members(world)) == again


@pytest.mark.parametrize("why", ["no checkpoints", "an older release", "torn", "a member is gone"])
def test_it_ends_at_once_where_nothing_can_be_saved(why: str) -> None:
    world = World(memory=60_000_000)
    world.closes = why != "an older release"
    world.start()
    world.settle()
    world.train(2)
    throw(world, "beta/1")
    world.turn()
    if why == "a member is gone":
        world.kill("alpha/1")
    throw(world, "alpha/0", holds=why != "torn", saves=why != "no checkpoints")
    world.settle()
    reason = ended(world)
    assert "ValueError" in reason
    assert "saved" not in reason


def test_a_first_step_that_raises_everywhere_ends_the_job_at_once() -> None:
    world = running()
    world.steps = 0
    throw(world, "beta/1")
    throw(world, "alpha/0")
    world.settle()
    assert "as on beta/1 before" in ended(world)


def test_the_only_device_ends_the_job_with_its_state_saved() -> None:
    world = running()
    for device in ("beta/0", "beta/1", "alpha/1"):
        world.kill(device)
    world.settle()
    assert recovered(world)
    throw(world, "alpha/0")
    world.settle()
    assert members(world) == {"alpha/0"}
    saved(world, "alpha/0")
    assert "no other device to try the step on; the state is saved" in ended(world)


def test_where_no_plan_is_left_without_its_device_the_job_ends_with_its_state_saved() -> None:
    """The rank stays, so that no torchrun starts it anew: the job would wait for capacity for ever."""
    world = running(memory=2_600_000)  # all four are needed
    before = members(world)
    assert len(before) == 4
    throw(world, "beta/1")
    world.settle()
    for _ in range(12):
        world.tick(1.0)
    assert world.phase is JobPhase.RUNNING, (world.phase, world.job.reason)
    assert members(world) == before
    saved(world, "beta/1")
    reason = ended(world)
    assert "ValueError: bad sample 17" in reason
    assert "and there is no plan without its device" in reason
    assert reason.count(SAVED) == 1


@pytest.mark.parametrize("turns", range(16))
def test_a_death_while_the_state_is_saved_ends_the_job_with_the_exception(turns: int) -> None:
    world = running()
    throw(world, "beta/1")
    throw(world, "alpha/0")
    for _ in range(turns):
        if world.inbox:
            world.turn()
    world.kill("beta/0")
    world.settle()
    for _ in range(30):
        world.tick(1.0)
    if world.phase is not JobPhase.STOPPED:  # it died before the second was heard
        saved(world, "alpha/0")
    assert "ValueError: bad sample 17" in ended(world)


@pytest.mark.parametrize("how", ["before", "between", "after"])
@pytest.mark.parametrize("together", [True, False])
def test_a_leader_that_dies_at_any_event_of_it_leaves_another_that_ends_it(how: str, together: bool) -> None:
    def lives(world: World) -> None:
        throw(world, "beta/1")
        if not together:
            world.settle()
        throw(world, "alpha/0")
        world.settle()

    whole = running()
    start = whole.events
    lives(whole)
    for at in range(start + 1, whole.events + 1):
        world = running()
        world.crash_at, world.crash_how = at, how
        lives(world)
        for _ in range(12):
            world.tick(1.0)
        if world.phase is not JobPhase.STOPPED:
            assert world.phase is JobPhase.RUNNING, f"crash {how} event {at}: {world.phase}"
            saved(world, "alpha/0")
        assert "ValueError: bad sample 17" in ended(world), f"crash {how} event {at}"


def test_the_sizes_of_memory_that_is_not_enough_may_differ_in_their_units() -> None:
    text = (
        "CUDA out of memory. Tried to allocate {} GiB. GPU {} has a total capacity of 79.10 GiB of which {}."
        " Of the allocated memory {} is allocated by PyTorch."
    )
    kind = "torch.OutOfMemoryError"
    one, other, none = (
        text.format(*with_)
        for with_ in (
            ("2.00", 0, "512.00 MiB", "77.20 GiB"),
            ("2.13", 3, "1.10 GiB", "76.01 GiB"),
            ("2.00", 0, "no", "77.20 GiB"),
        )
    )
    thrown = Thrown(device="beta/1", step=3, kind=kind, text=one, traceback="")
    body = Raised(plan=1, step=3, kind=kind, text=other, traceback="")
    assert alike(thrown, body)
    assert not alike(thrown, msgspec.structs.replace(body, text=none))


def test_what_is_over_is_not_begun_anew_for_a_new_leader() -> None:
    world = running()
    throw(world, "beta/1")
    world.settle()
    number = world.job.number
    world.kill("beta/1")
    world.settle()
    world.new_leader()
    world.settle()
    for _ in range(6):
        world.tick(1.0)
    assert world.phase is JobPhase.RUNNING
    assert world.job.number == number
    assert world.kinds().count("raised") == 1
    throw(world, "alpha/0")
    world.settle()
    assert world.job.ending.failing, "and the new leader knows that it was tried before"


def test_devices_that_a_new_leader_never_met_may_try_the_step() -> None:
    """Their agent is started again while the leader dies."""
    world = running()
    devices = members(world)
    assert {node_of(device) for device in devices} == {"alpha", "beta"}
    away = world.records.pop("alpha")
    world.cut, world.deaf = {"alpha"}, {device for device in devices if device.startswith("alpha/")}
    world.kill("beta/0")
    throw(world, "beta/1")
    world.new_leader()
    world.settle()
    for _ in range(20):
        world.tick()
    assert world.phase is JobPhase.RECOVERING, world.job.reason
    assert "no other device could go on" in world.job.reason
    world.records["alpha"] = away
    world.cut, world.deaf = set(), set()
    world.reconnect("alpha")
    for device in ("alpha/0", "alpha/1"):
        world.thaw(device)
    world.settle()
    for _ in range(5):
        world.tick()
    assert recovered(world), world.job.reason
    assert members(world) <= {device for device in devices if device.startswith("alpha/")}


def test_what_a_worker_says_of_it_is_bounded_and_one_line() -> None:
    world = running()
    body = throw(world, "beta/1", text="a\nb\x1b[2J" + "x" * 5000)
    world.up("beta/1", msgspec.structs.replace(body, traceback="y" * 100_000))
    world.settle()
    world.up("beta/1", msgspec.structs.replace(body, kind="a\nb", text=""))
    world.settle()
    notes = [note for note in world.notes if note.kind == "raised"]
    assert all("\n" not in note.text and "\x1b" not in note.text and len(note.text) < 1200 for note in notes)
    assert all(len(note.data["traceback"]) <= MOST_TRACEBACK for note in notes)


@pytest.mark.parametrize("deaths", [0, 2])
def test_what_ends_all_members_alike_ends_the_job_with_it(deaths: int) -> None:
    """A sample that cannot be read; some of them may have ended before its word is heard."""
    world = running()
    for device in ("alpha/0", "alpha/1")[:deaths]:
        world.kill(device)
    world.settle()
    body = Raised(
        plan=world.workers["beta/1"].plan,
        step=world.steps,
        kind="elasticd.SampleError",
        text="sample 7",
        traceback="in __getitem__",
        holds=True,
        saves=True,
        ends=True,
    )
    world.outcome(world.workers["beta/1"], body)
    world.settle()
    assert "SampleError: sample 7" in ended(world)
    assert ended(world).count("the state is saved") == 1
    assert world.job.ending.thrown[-1].traceback == "in __getitem__"


def test_a_worker_that_comes_in_the_step_that_ends_the_job_is_turned_away() -> None:
    """The job ends with a last checkpoint; a member's process is replaced before its end was told."""
    world = running()
    for device in ("alpha/0", "alpha/1", "beta/0"):
        throw(world, device, text="No space left on device: /mnt/run7/step_0123")
        world.settle()
        if device != "beta/0":
            world.kill(device)
            world.settle()
            world.workers.pop(device)
            world.train(1)
    assert world.job.ending.failing
    (other,) = members(world) - {"beta/0"}
    another = FakeWorker(device=other, incarnation="another")
    world.say(Received(node=node_of(other), message=another.up(world.hello(another))))
    world.settle()
    assert world.phase is JobPhase.STOPPED
    assert all(worker.incarnation != "another" for worker in world.job.workers.values())


def test_the_step_that_failed_is_called_as_the_script_calls_it() -> None:
    """The loop's body has a step that is made already."""
    world = running()
    throw(world, "beta/1", index=world.steps - 1)
    world.settle()
    (note,) = [note for note in world.notes if note.kind == "raised"]
    assert f"(in step {world.steps - 1}, on beta/1)" in note.text
    assert note.data["step"] == world.job.ending.thrown[-1].step == world.steps - 1
