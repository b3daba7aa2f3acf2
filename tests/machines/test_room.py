"""A plan is checked by its layouts: replicas that one device keeps for many, two copies during a switch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.layout.optimizer_sharding import with_carriers
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy

from elasticd.machines.job.copies.memory import Room, room
from elasticd.machines.job.replan import _cluster
from elasticd.machines.job.state.events import Received
from elasticd.machines.job.state.job_state import JobPhase, JobSettings
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.node_health import Health
from elasticd.wire.worker import Hello, PeersLost, StateReport, StayedOnPlan, WorkerDevice
from tests.machines.cast import FakeWorker, model
from tests.machines.vaulted import Vaulted

SPEC = model()
PROFILE = derive(SPEC, 64.0, 1)


def plan(state: StatePolicy) -> Plan:
    """Three replicas on alpha; beta's one device is idle."""
    pipelines = tuple(
        Pipeline(stages=(Stage(start=0, stop=8, devices=(f"alpha/{i}",), shares=(1,)),), micro_batches=2)
        for i in range(3)
    )
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),))
    made = Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=6, state=state, idle=("beta/0",))
    return with_carriers(made)


def nodes(memory: int) -> dict[str, int]:
    return {"alpha/0": 1 << 30, "alpha/1": 1 << 30, "alpha/2": 1 << 30, "beta/0": memory}


def test_a_carrier_without_room_for_its_replicas_is_named() -> None:
    carried = plan(StatePolicy(zero=1, replicas=2))
    assert carried.carriers == ("beta/0",)
    said = room(carried, None, SPEC, PROFILE, nodes(1 << 20)).lacks
    assert said.startswith("beta/0 would have to keep")
    assert "2 replicas" in said
    assert room(carried, None, SPEC, PROFILE, nodes(1 << 30)) == Room()


def test_without_zero_the_planner_alone_counts() -> None:
    assert room(plan(StatePolicy()), None, SPEC, PROFILE, nodes(1 << 20)) == Room()


def two(cut: int) -> Plan:
    """One pipeline of two stages on alpha."""
    stages = (
        Stage(start=0, stop=cut, devices=("alpha/0",), shares=(1,)),
        Stage(start=cut, stop=8, devices=("alpha/1",), shares=(1,)),
    )
    strategy = Strategy(
        modules=(ModulePlan(module="model", pipelines=(Pipeline(stages=stages, micro_batches=2),)),)
    )
    return Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=2)


def alone(memory: int) -> dict[str, int]:
    return {"alpha/0": memory, "alpha/1": memory}


def test_only_what_changes_is_needed_twice() -> None:
    """A block has 36,928 parameters, embedding and head 16,384 each, of 4 bytes; with gradient and AdamW's two
    moments four times that while it trains, and three times that as it moves."""
    block, end = 4 * 36_928, 4 * 16_384
    both = 4 * (4 * block + end) + 3 * block  # alpha/1 gets one more
    for memory, cramped in ((both, False), (both - 1, True)):
        found = room(two(3), two(4), SPEC, PROFILE, alone(memory), holders=("alpha/0", "alpha/1"))
        assert bool(found.cramped) == cramped
        assert not cramped or found.cramped.startswith("alpha/1 has 2.9 MiB and would need 2.9 MiB")
    assert room(two(4), two(4), SPEC, PROFILE, alone(both - 3 * block)) == Room()
    anew = 3 * (4 * block + end)
    for memory, cramped in ((anew, False), (anew - 1, True)):
        assert bool(room(two(4), two(4), SPEC, PROFILE, alone(memory), anew=True).cramped) == cramped


def test_plans_leave_room_for_as_many_communicators_as_a_device_may_have() -> None:
    assert JobSettings().usable(1000) == 1000
    assert JobSettings(communicator=10).usable(1000) == 1000 - 24 * 10
    assert JobSettings(communicator=100).usable(1000) == 1, "no plan fits, and the refusal says what it needs"


def test_a_problem_and_a_switch_count_with_that_room() -> None:
    world = Vaulted(memory=CRAMPED)
    world.start()
    world.settle()
    world.train(12)
    turn = SimpleNamespace(settings=JobSettings(communicator=1000), nodes=world.state.nodes, job=world.job)
    devices = tuple(d for node in world.state.nodes.values() for d in node.record.devices)
    memory = {device.memory for device in _cluster(cast(Transaction, turn), devices).devices}
    assert memory == {CRAMPED - 24 * 1000}


#: Room for one copy of what the planner asks of a device, not for two.
CRAMPED = 2_800_000


def straggling(every: int) -> Vaulted:
    world = Vaulted(memory=CRAMPED, every=every)
    world.start()
    world.settle()
    world.train(12)
    world.rates = {"alpha/0": 3.0}
    world.train(20)
    return world


def test_where_two_copies_do_not_fit_state_moves_in_place_if_it_is_safe_elsewhere() -> None:
    world = straggling(every=1)
    moved = next(p for p in world.proposals if p.in_place)
    told = next(n.text for n in world.notes if n.kind == "proposed" and n.data["number"] == moved.number)
    assert "for the old copy and the new: state moves in place, and that cannot be given up" in told
    assert world.job.number >= moved.number


def test_where_it_is_safe_nowhere_else_the_plan_stays_and_it_is_said_why() -> None:
    world = straggling(every=10**6)
    assert [p.in_place for p in world.proposals] == [False]
    assert world.phase is JobPhase.RUNNING
    told = [n.text for n in world.notes if n.kind == "refused"]
    assert len(told) >= 1
    assert "plan 1 stays, the new one does not fit" in told[0]
    assert "it could move in place if snapshots (CheckpointingOptions(snapshot_every=...))" in told[0]


class OnDevices(Vaulted):
    """Its workers compute on `device`, and its nodes have so many bytes free (None: they do not say)."""

    def __init__(self, device: str, available: int | None) -> None:
        self.device = device
        super().__init__(memory=CRAMPED, every=10**6)
        for node in self.records:
            self.say(Received(node=node, message=Health(memory_available=available)))

    def hello(self, worker: FakeWorker, **changes: object) -> Hello:
        hello = super().hello(worker, **changes)
        return msgspec.structs.replace(hello, computes_on=WorkerDevice(name=self.device))


@pytest.mark.parametrize(
    ("device", "available", "aside"),
    [
        ("cuda:0", 1 << 30, True),
        ("cuda:0", 1 << 20, False),
        ("cuda:0", None, False),
        ("cpu", 1 << 30, False),
    ],
)
def test_where_its_node_has_memory_a_device_sets_the_old_copy_aside(
    device: str, available: int | None, aside: bool
) -> None:
    """No snapshot is needed for that."""
    world = OnDevices(device, available)
    world.start()
    world.settle()
    world.train(12)
    world.rates = {"alpha/0": 3.0}
    world.train(20)
    if not aside:
        assert [(p.in_place, p.aside) for p in world.proposals] == [(False, ())]
        return
    moved = next(p for p in world.proposals if p.aside)
    assert moved.old is not None
    assert set(moved.aside) <= set(moved.old.members)
    assert not moved.in_place
    told = next(n.text for n in world.notes if n.kind == "proposed" and n.data["number"] == moved.number)
    assert told.endswith("what changes of the old copy goes to the host's memory meanwhile")
    assert world.job.number >= moved.number


def test_where_a_host_refused_the_next_switch_does_without() -> None:
    world = OnDevices("cuda:0", 1 << 30)
    world.start()
    world.settle()
    world.train(1)
    world.deaf = {*world.workers}
    world.rates = {"alpha/0": 3.0}
    while not any(p.aside for p in world.proposals):
        world.train(1)
    moved = next(p for p in world.proposals if p.aside)
    assert world.phase is JobPhase.PROPOSED
    worker, world.deaf = world.workers[moved.aside[0]], set()
    world.outcome(worker, StayedOnPlan(number=moved.number, step=world.steps, reason="the host has no memory"))
    world.settle()
    assert world.job.switching.no_aside
    world.train(40)
    assert {p.number for p in world.proposals if p.aside} == {moved.number}
    assert any("it could move in place" in note.text for note in world.notes if note.kind == "refused")


def test_a_move_in_place_that_fails_is_recovered_from_by_the_snapshots() -> None:
    """Nobody holds a whole copy of either plan, and says so."""
    world = Vaulted(memory=CRAMPED)
    world.start()
    world.settle()
    world.train(12)
    world.deaf = {"beta/1"}
    world.rates = {"alpha/0": 3.0}
    while not any(p.in_place for p in world.proposals):
        world.train(1)
    step = world.steps
    world.deaf = {*world.workers}
    world.outcome(world.workers["beta/1"], PeersLost(step=step, reason="reset while it moved in place"))
    world.settle()
    world.tick(0.6)
    fence = world.job.losses.fence
    assert fence is not None
    world.deaf = set()
    for device in world.workers:
        world.stand(device, StateReport(fence=fence.number, copies=()))
    for _ in range(8):
        world.tick(0.5)
    assert world.phase is JobPhase.RUNNING, world.job.reason
    assert world.gone_back == [0]
    assert world.steps == step
    assert world.proposals[-1].recovery is not None
    assert world.proposals[-1].recovery.snapshots
