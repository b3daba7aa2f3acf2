"""Who decides about checkpoints: the leader offers and publishes, the agents tell what the store says."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.spec.cluster import node_of

from elasticd.coordinator.store_writer import stored
from elasticd.machines.agent.state import AgentNote, CheckpointsRead, LinkDown, LinkUp
from elasticd.machines.coordinator.message_checks import MOST_CHECKPOINTS
from elasticd.machines.job.copies.checkpoints import MOST_PUBLISHED, MOST_WAITING
from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import CheckpointsRecord, PublishedCheckpoint, decode
from elasticd.wire.worker import Hello, Published, Saved
from tests.machines.agent_scene import JOB as AGENTS_JOB
from tests.machines.agent_scene import down, hello, proposal, read_proposal, run, said, sent, told
from tests.machines.cast import JOB, FakeWorker
from tests.machines.world import KEYS, World

NAMES = ("step-00000020.plan-3.aa", "step-00000010.plan-3.aa")


class Seeing(World):
    """A world whose workers see checkpoints, each of them what `sees` has for its device."""

    def __init__(self, **sees: tuple[str, ...]) -> None:
        self.sees = {device.replace("_", "/"): names for device, names in sees.items()}
        super().__init__()

    def hello(self, worker: FakeWorker, **changes: object) -> Hello:
        names = self.sees.get(worker.device, NAMES)
        return msgspec.structs.replace(super().hello(worker, **changes), checkpoints=names)


def record(world: World) -> CheckpointsRecord | None:
    item = world.store.get(KEYS.job(JOB, "checkpoints"))
    return decode(item.value, CheckpointsRecord) if item is not None else None


def save(world: World, step: int, plan: int = 1, device: str | None = None) -> Saved:
    running = world.plan()
    assert running is not None
    body = Saved(name=f"step-{step:08d}.plan-{plan}.x", step=step, plan=plan)
    world.up(device or running.members[0], body)
    world.settle()
    return body


def test_the_first_plan_starts_from_what_all_workers_see_the_newest_first() -> None:
    world = Seeing(beta_1=(NAMES[1],))
    proposals = []
    world._read = lambda found, read=world._read: (proposals.append(found), read(found))  # type: ignore[method-assign,misc]
    world.start()
    assert proposals[0].checkpoints == (NAMES[1],)
    world = Seeing()
    world.start()
    assert world.phase is JobPhase.RUNNING


def test_a_job_does_not_start_anew_where_only_some_see_checkpoints() -> None:
    world = Seeing(beta_1=())
    world.start()
    assert world.phase is JobPhase.STOPPED
    assert NAMES[0] in world.job.reason
    assert "beta/1 does not" in world.job.reason
    assert "share" in world.job.reason


def test_later_plans_move_the_state_and_read_no_checkpoint() -> None:
    world = Seeing()
    world.start()
    seen = []
    world._read = lambda found, read=world._read: (seen.append(found), read(found))  # type: ignore[method-assign,misc]
    world.train(16)
    assert seen
    assert all(found.checkpoints == () for found in seen)


def test_a_checkpoint_is_published_once_and_again_by_the_next_leader_under_its_epoch() -> None:
    world = World()
    world.start()
    body = save(world, 10)
    found = record(world)
    assert found is not None
    assert found.published == (PublishedCheckpoint(name=body.name, step=10, plan=1),)
    assert world.kinds().count("checkpoint") == 1
    world.new_leader()
    world.settle()
    save(world, 10)
    again = record(world)
    assert again is not None
    assert again.published == found.published
    assert again.epoch == found.epoch + 1
    assert world.kinds().count("checkpoint") == 1
    save(world, 20)
    (job,) = stored(KEYS, world.store.snapshot(KEYS.jobs).items)
    assert job.checkpoints is not None
    assert [one.step for one in job.checkpoints.published] == [10, 20]


def test_what_is_said_again_and_again_is_written_once_a_second() -> None:
    world = World()
    world.start()
    first = save(world, 10)
    writes = world.store.snapshot(KEYS.jobs).revision
    for _ in range(200):
        assert save(world, 10) == first
    assert world.store.snapshot(KEYS.jobs).revision == writes
    world.tick(1.0)
    assert world.store.snapshot(KEYS.jobs).revision == writes + 1, "for an agent that had not taken it"
    world.tick(5.0)
    assert world.store.snapshot(KEYS.jobs).revision == writes + 1


@pytest.mark.parametrize("name", ["x" * 5000, "a/b", "", "a\nb"])
def test_a_name_that_no_checkpoint_has_is_not_published(name: str) -> None:
    world = World()
    world.start()
    world.up("alpha/0", Saved(name=name, step=10, plan=1))
    world.up("alpha/0", Saved(name=name, step=10, plan=9))
    world.settle()
    assert record(world) is None
    assert not world.job.checkpoints.unpublished


def test_checkpoints_that_a_worker_sees_are_bounded_and_the_newest_count() -> None:
    many = tuple(f"step-{10_000 - number:08d}.plan-1.aa" for number in range(5000))
    seen = (many[0], "x" * 5000, *many[1:])
    world = Seeing(**dict.fromkeys(("alpha_0", "alpha_1", "beta_0", "beta_1"), seen))
    world.start()
    assert world.proposals[0].checkpoints == many[: MOST_CHECKPOINTS - 1]


def test_the_list_in_the_store_is_bounded() -> None:
    world = World()
    world.start()
    for step in range(MOST_PUBLISHED + 5):
        save(world, step)
    found = record(world)
    assert found is not None
    assert [one.step for one in found.published] == list(range(5, MOST_PUBLISHED + 5))


def test_a_checkpoint_of_a_plan_that_is_not_recorded_yet_is_published_once_it_is() -> None:
    """A fence came between the first swap and its record; the saver says what it wrote once, and waits."""
    world = World()
    world.start()
    early = save(world, 10, plan=2)
    save(world, 10, plan=2)
    far = save(world, 10, plan=1 << 40)
    assert record(world) is None
    world.train(16)
    plan = world.plan()
    assert plan is not None
    assert plan.number >= 2
    found = record(world)
    assert found is not None
    assert [one.name for one in found.published] == [early.name]
    assert [one.name for one in world.job.checkpoints.unpublished] == [far.name]


def test_checkpoints_of_plans_to_come_are_bounded() -> None:
    world = World()
    world.start()
    for step in range(100):
        save(world, step, plan=1 << 40)
    assert len(world.job.checkpoints.unpublished) == MOST_WAITING


@pytest.mark.parametrize("who", ["another incarnation", "a plan to come", "a job that is over"])
def test_what_is_no_part_of_the_jobs_history_is_not_published(who: str) -> None:
    world = World()
    world.start()
    plan = world.plan()
    assert plan is not None
    device = plan.members[0]
    body = Saved(name="step-00000010.plan-1.x", step=10, plan=2 if who == "a plan to come" else 1)
    up = world.workers[device].up(body)
    if who == "another incarnation":
        up = msgspec.structs.replace(up, incarnation="left out")
    elif who == "a job that is over":
        world.finish()
        world.settle()
    world.say(Received(node=node_of(device), message=up))
    world.settle()
    assert record(world) is None


# -- the agent -------------------------------------------------------------------------------------------------


SAVED = Saved(name=NAMES[0], step=20, plan=3)
PUBLISHED = CheckpointsRecord(published=(PublishedCheckpoint(name=NAMES[0], step=20, plan=3),), epoch=5)


def test_a_worker_hears_from_the_store_that_its_checkpoint_is_published_and_once() -> None:
    read = CheckpointsRead(job=AGENTS_JOB, record=PUBLISHED)
    state, effects = run(LinkUp(), hello(0), hello(1), said(SAVED), read)
    assert sent(effects) == [("w0", Published(name=NAMES[0]))]
    _, effects = run(read, state=state)
    assert sent(effects) == []
    _, effects = run(LinkDown(), LinkUp(), state=state)
    assert SAVED not in told(effects), "the next leader need not hear what is published"


def test_what_is_not_published_yet_is_said_to_every_leader_whatever_is_decided_meanwhile() -> None:
    later = proposal(9, {"n0/0": "i0"})
    events = (LinkUp(), hello(0), said(SAVED), read_proposal(later))
    _, effects = run(*events, CheckpointsRead(job=AGENTS_JOB, record=None), LinkDown(), LinkUp())
    assert SAVED in told(effects)


def test_a_list_below_the_highest_epoch_is_refused_and_so_is_word_over_the_link() -> None:
    stale = CheckpointsRead(job=AGENTS_JOB, record=msgspec.structs.replace(PUBLISHED, epoch=4))
    seen = read_proposal(proposal(2, {"n1/0": "x"}, epoch=5))
    state, effects = run(LinkUp(), hello(0), said(SAVED), seen, stale)
    assert [type(effect) for effect in effects] == [AgentNote]
    _, effects = run(down("w0", Published(name=NAMES[0])), state=state)
    assert [type(effect) for effect in effects] == [AgentNote]
