"""A job on a mesh in the leader's machine: first plan, death, drain, join, standby, and shares of samples."""

from __future__ import annotations

import pytest
from elasticd_planner.spec.mesh import MeshTensor, Placement
from msgspec.structs import replace

from elasticd.machines.job.assembly import difference
from elasticd.machines.job.state.job_state import JobPhase
from elasticd.records import AnyHistoryRecord, HistoryRecord, MeshHistoryRecord, decode_history
from tests.machines.cast import JOB, FakeWorker, spec
from tests.machines.checked import KEYS
from tests.machines.meshed import Meshed
from tests.machines.test_adoption import adopt, wiped
from tests.machines.test_drain import drain, nodes_of, train_until
from tests.machines.test_recovery import recovered
from tests.machines.world import World

HSDP = "replicate, shard", "shard"


def running(
    *meshes: str, nodes: tuple[str, ...] = ("alpha", "beta"), every: int = 0, batch: int = 24
) -> Meshed:
    world = Meshed(*meshes, nodes=nodes, every=every, batch=batch)
    world.start()
    world.settle()
    world.train(3)
    assert world.phase is JobPhase.RUNNING, world.job.reason
    return world


def newest(world: World) -> AnyHistoryRecord:
    """Why the newest plan was made, as it is stored."""
    items = world.store.snapshot(KEYS.job(JOB, "history/")).items
    return decode_history(items[-1].value)


def test_the_first_plan_is_a_mesh_of_all_devices_and_evenly_shared_samples() -> None:
    world = running(*HSDP)
    assert (world.mesh.names, world.mesh.shape) == (("replicate", "shard"), (2, 2))
    assert world.mesh.samples == (6, 6, 6, 6)
    proposed = next(note for note in world.notes if note.kind == "proposed")
    assert proposed.text == "plan 1: a mesh of replicate=2, shard=2 on 4 devices"
    record = newest(world)
    assert isinstance(record, MeshHistoryRecord)
    assert record.plan.shape == (2, 2)


def test_replicas_go_on_after_a_death_with_every_device_that_lives() -> None:
    world = running(*HSDP)
    world.kill("beta/1")
    world.settle()
    assert recovered(world), world.job.reason
    assert (world.mesh.names, world.mesh.shape) == (("shard",), (3,))
    assert world.mesh.samples == (8, 8, 8)
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert set(recovery.sources) == {"alpha/0", "alpha/1", "beta/0"}
    assert not recovery.snapshots, "the living hold all of it"


@pytest.mark.parametrize("how", ["before", "between", "after"])
def test_a_leader_that_dies_at_any_event_of_a_fault_leaves_another_that_ends_it(how: str) -> None:
    whole = running(*HSDP)
    start = whole.events
    whole.kill("beta/1")
    whole.settle()
    for at in range(start + 1, whole.events + 1):
        world = running(*HSDP)
        world.crash_at, world.crash_how = at, how
        world.kill("beta/1")
        world.settle()
        for _ in range(12):
            world.tick(1.0)
        assert recovered(world), f"crash {how} event {at}: {world.phase} {world.job.reason}"
        assert "beta/1" not in world.mesh.members


@pytest.mark.parametrize("more", range(10))
def test_a_second_death_at_any_event_of_a_fault(more: int) -> None:
    world = running("ddp", nodes=("alpha", "beta", "gamma"))
    world.kill("beta/1")
    for _ in range(more):
        world.turn()
    world.kill("gamma/0")
    world.settle()
    assert recovered(world), world.job.reason
    assert len(world.mesh.members) == 4


def test_it_is_said_of_plain_shards_that_they_have_one_copy() -> None:
    said = "; parts of the state have one copy: without its device they are read from a snapshot"
    for meshes, has in ((("shard",), True), (HSDP, False), (("ddp",), False), (("dp, tp=2",), True)):
        proposed = next(note.text for note in running(*meshes).notes if note.kind == "proposed")
        assert proposed.endswith(said) == has


def test_plain_shards_without_a_snapshot_end_the_job_and_name_the_box() -> None:
    world = running("shard")
    world.kill("beta/1")
    world.settle()
    assert world.phase is JobPhase.STOPPED
    assert "weight [6:8, 0:6]" in world.job.reason
    assert "no snapshot or checkpoint" in world.job.reason


def test_of_plain_shards_the_dead_devices_alone_is_read_from_its_snapshot_of_the_same_step() -> None:
    world = running("shard", every=1)
    made = world.steps
    world.kill("beta/1")
    world.settle()
    for _ in range(5):
        world.tick(1.0)
    assert recovered(world), world.job.reason
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert recovery.step == made, "nothing is made again"
    assert world.gone_back == []
    assert {*recovery.snapshots} == {"beta/1"}, "who lives goes on from its own copy"
    assert {*recovery.sources} == {"alpha/0", "alpha/1", "beta/0"}
    assert world.mesh.shape == (3,)
    proposed = [note.text for note in world.notes if note.kind == "proposed"][-1]
    assert f"the part of beta/1 is read from snapshots of step {made} in memory on " in proposed


def test_a_node_with_all_its_agent_had_is_completed_from_what_its_peer_keeps() -> None:
    world = running("shard", nodes=("alpha", "beta", "gamma"), every=1)
    made = world.steps
    world.lose("beta")
    world.disconnect("beta")
    for _ in range(40):
        world.tick(1.0)
    assert recovered(world), world.job.reason
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert (recovery.step, {*recovery.snapshots}) == (made, {"beta/0", "beta/1"})
    assert {*recovery.snapshots.values()} == {"gamma/0", "gamma/1"}, "whose agent has them"
    assert world.gone_back == []


def test_the_living_go_back_where_the_dead_device_left_no_snapshot_of_their_step() -> None:
    """Its own agent has that of the step before."""
    world = running("shard", every=1)
    world.every = 1 << 30
    world.train(1)
    made = world.steps
    world.kill("beta/1")
    world.settle()
    for _ in range(5):
        world.tick(1.0)
    assert recovered(world), world.job.reason
    assert world.gone_back == [1]
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert (recovery.step, len(recovery.snapshots)) == (made - 1, 4)


def test_copies_and_snapshots_that_do_not_fit_are_tried_once_and_then_all_go_back() -> None:
    """To the set of the same step: each rank reads its own share, too."""
    world = running("shard", every=1)
    made = world.steps
    world.refuse = {"alpha/0"}
    world.kill("beta/1")
    world.settle()
    first = world.proposals[-1].recovery
    assert first is not None
    assert {*first.snapshots} == {"beta/1"}
    world.refuse = set()
    for _ in range(20):
        world.tick(1.0)
    assert recovered(world), world.job.reason
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert (recovery.step, len(recovery.snapshots)) == (made, 4)


@pytest.mark.parametrize("more", range(16))
def test_a_second_death_at_any_event_of_a_recovery_from_copies_and_snapshots(more: int) -> None:
    world = running("shard", nodes=("alpha", "beta", "gamma"), every=1)
    made = world.steps
    world.kill("beta/1")
    for _ in range(more):
        if world.inbox or world.planning is not None:
            world.turn()
    world.kill("gamma/0")
    world.settle()
    for _ in range(20):
        world.tick(1.0)
    assert recovered(world), world.job.reason
    assert len(world.mesh.members) == 4
    assert world.steps == made, "no step is made again"


@pytest.mark.parametrize("how", ["before", "between", "after"])
def test_a_new_leader_at_any_event_of_a_recovery_from_copies_and_snapshots(how: str) -> None:
    whole = running("shard", every=1)
    start = whole.events
    whole.kill("beta/1")
    whole.settle()
    for at in range(start + 1, whole.events + 1):
        world = running("shard", every=1)
        made = world.steps
        world.crash_at, world.crash_how = at, how
        world.kill("beta/1")
        world.settle()
        for _ in range(14):
            world.tick(1.0)
        assert recovered(world), f"crash {how} event {at}: {world.phase} {world.job.reason}"
        assert world.steps == made, f"crash {how} event {at}"


def test_plain_shards_go_back_to_the_last_snapshots_and_no_further() -> None:
    world = running("shard", every=4)
    world.train(7 - world.steps % 4)
    made, kept = world.steps, world.steps // 4 * 4
    assert made == kept + 3
    world.kill("beta/1")
    world.settle()
    for _ in range(5):
        world.tick(1.0)
    assert recovered(world), world.job.reason
    recovery = world.proposals[-1].recovery
    assert recovery is not None
    assert recovery.step == kept
    assert world.gone_back == [made - kept]


def test_shards_lie_inside_nodes_so_that_a_whole_node_may_die() -> None:
    world = running(*HSDP)
    assert world.mesh.members == ("alpha/0", "alpha/1", "beta/0", "beta/1")
    world.kill("beta/0")
    world.kill("beta/1")
    world.settle()
    assert recovered(world), world.job.reason
    assert (world.mesh.shape, world.mesh.members) == ((2,), ("alpha/0", "alpha/1"))


def test_three_survivors_of_tensor_parallelism_are_two_that_work_and_one_that_stands_by() -> None:
    world = running("dp, tp=2", every=1)
    assert world.mesh.lanes == (("alpha/0", "alpha/1"), ("beta/0", "beta/1"))
    assert world.mesh.samples == (12, 12)
    world.kill("beta/0")
    world.settle()
    world.tick(1.0)
    assert recovered(world), world.job.reason
    assert (world.mesh.shape, world.mesh.members, world.mesh.idle) == (
        (1, 2),
        ("alpha/0", "alpha/1"),
        ("beta/1",),
    )
    assert world.job.workers["beta/1"].left_at is None, "it is a standby worker"
    world.train(3)
    world.workers["beta/0"] = FakeWorker(device="beta/0", incarnation="again")
    world.up("beta/0", world.hello(world.workers["beta/0"]))
    train_until(world, lambda: world.phase is JobPhase.RUNNING and world.mesh.shape == (2, 2))


def test_a_drained_node_is_left_and_taken_again() -> None:
    world = running(*HSDP)
    drain(world, "beta")
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"alpha"})
    assert "fenced" not in world.kinds()
    drain(world, "beta", on=False)
    train_until(world, lambda: world.phase is JobPhase.RUNNING and nodes_of(world) == {"alpha", "beta"})
    assert world.mesh.shape == (2, 2)


def test_shares_follow_a_rank_at_a_third_of_its_speed_and_its_recovery() -> None:
    world = running("shard")
    before = world.mesh
    world.rates["alpha/1"] = 3.0
    train_until(world, lambda: world.mesh.samples == (8, 2, 7, 7) and world.phase is JobPhase.RUNNING)
    assert world.mesh.same_mesh(before), "nothing is made and nothing moves"
    assert world.steps <= 15
    assert "with 8, 2, 7, 7 samples of a step in its lanes" in world.mesh.reason
    world.rates.clear()
    train_until(world, lambda: world.mesh.samples == (6, 6, 6, 6) and world.phase is JobPhase.RUNNING)


def test_a_leader_whose_store_is_empty_leaves_the_job_alone_and_adopts_its_mesh() -> None:
    world = wiped(running("shard"))
    assert world.job.takeover.unadopted is not None
    adopt(world)
    train_until(world, lambda: world.phase is JobPhase.RUNNING)
    assert world.mesh.shape == (4,)
    assert world.job.spec == world.mesh_spec
    world.train(3)


@pytest.mark.parametrize("at", range(0, 14, 2))
def test_a_change_of_shares_is_given_up_for_a_death_in_its_midst(at: int) -> None:
    world = running("ddp")
    world.rates["alpha/1"] = 3.0
    while world.phase is JobPhase.RUNNING:
        world.train(1)
    assert world.phase is JobPhase.PROPOSED
    for _ in range(at):
        world.turn()
    world.kill("beta/0")
    world.settle()
    world.tick(1.0)
    train_until(world, lambda: recovered(world) and "beta/0" not in world.mesh.members)
    assert world.mesh.global_batch == 24
    slow = world.mesh.samples[world.mesh.lane_of["alpha/1"]]
    assert slow == min(world.mesh.samples) < 8


def test_noise_changes_no_shares() -> None:
    world = running("shard")
    number, world.noise = world.mesh.number, 0.2
    world.train(200)
    assert world.mesh.number == number
    assert world.kinds().count("proposed") == 1


def test_a_job_that_keeps_its_plan_keeps_its_shares() -> None:
    world = Meshed("shard", keep_plan=True)
    world.start()
    world.settle()
    world.train(3)
    world.rates["alpha/1"] = 3.0
    world.train(20)
    assert world.mesh.samples == (6, 6, 6, 6)
    assert "kept_plan" in world.kinds()


def test_too_few_samples_for_a_mesh_end_the_job_with_what_to_do() -> None:
    world = Meshed("shard=4", batch=3)
    world.start()
    world.settle()
    assert world.phase is JobPhase.STOPPED
    assert (
        "4 devices with 3 samples a step fill none of the meshes that the job may have (shard=4)"
        in world.job.reason
    )


def test_a_worker_of_the_other_kind_is_told_what_differs() -> None:
    ours = Meshed("shard").mesh_spec
    assert difference(ours, spec()) == "it trains in an elasticd.Job, not in elasticd.live's loop of its own"
    assert difference(ours, ours) == ""


def test_a_worker_whose_model_is_another_one_is_told_the_first_tensor_that_differs() -> None:
    ours = Meshed("shard").mesh_spec
    weight, steps = ours.model.tensors

    def told(*tensors: MeshTensor) -> str:
        return difference(ours, replace(ours, model=replace(ours.model, tensors=tensors)))

    assert told(replace(weight, shape=(9, 6)), steps) == "weight has the shape (9, 6), not (8, 6)"
    assert told(replace(weight, kind="frozen"), steps) == "weight has the kind frozen, not trained"
    moved = replace(weight, placements=((Placement(dim=1),),))
    assert told(moved, steps) == "weight is placed [S(1)] on a mesh of shard, not [S(0)]"
    assert told(weight) == "its model has no tensor steps"
    assert told(weight, steps, replace(steps, name="more")) == "its model has a tensor more"
    assert told(steps, weight) == "its tensors are in another order"
    others = Meshed("ddp").mesh_spec
    assert difference(ours, others) == "its meshes are ddp, not shard"


def test_the_history_of_a_job_of_pipelines_is_read_as_before() -> None:
    from tests.machines.test_recovery import running as pipelined

    world = pipelined()
    assert isinstance(newest(world), HistoryRecord)
