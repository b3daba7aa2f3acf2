"""What a leader hears: a node's word about itself, and names in the one grammar."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from elasticd_planner.spec.cluster import Device
from elasticd_planner.spec.measurement import Measurement
from hypothesis import given
from hypothesis import strategies as st

from elasticd.coordinator.store_writer import stored
from elasticd.machines.agent import machine as agent_machine
from elasticd.machines.agent import state as agent_state
from elasticd.machines.agent.state import Opened
from elasticd.machines.coordinator import machine as coordinator
from elasticd.machines.coordinator import message_checks
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job import machine
from elasticd.machines.job.state.events import CoordinatorNote, CoordinatorTick, Event, Received, Write
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, fresh
from elasticd.names import LONGEST, device_of, harmless, name_refusal
from elasticd.records import DoneRecord, NodeRecord, PlanRecord
from elasticd.wire.coordinator import AgentHello, Crossed, FromClient, Frozen, ToLeader, WorkerLost
from elasticd.wire.node_health import Health
from elasticd.wire.rendezvous import Join, Lap, StepTime, Watching
from elasticd.wire.snapshots import Held, SnapshotInventory
from elasticd.wire.worker import Finished, Report, StoreCall
from tests.cli.test_status import PLAN
from tests.machines.cast import node_record
from tests.machines.checked import KEYS
from tests.machines.test_recovery import running
from tests.machines.world import World

GOOD = ["demo", "a", "7", "llama-3.1_70b", "x" * LONGEST, "..a"]
BAD = ["", "team-a/run1", "a b", "a\nb", "\x1b[2J", "ä", "x" * (LONGEST + 1), ".", "..", "-", "a\0", "٣"]


@pytest.mark.parametrize("name", GOOD)
def test_names_that_are_taken(name: str) -> None:
    assert name_refusal("job", name) == ""


@pytest.mark.parametrize(
    ("name", "can_be"),
    [("exp=1", True), ("a b", True), ("ä", True), ("run:7", True), ("a/b", False), ("", False)],
)
def test_what_release_0_1_took_is_known_where_a_job_runs_under_it(name: str, can_be: bool) -> None:
    assert name_refusal("job", name)
    assert harmless(name) == can_be
    join = Opened(client="t", pid=1, incarnation="i", body=Join(job=name, min_nodes=1, max_nodes=1, pid=1))
    agent = agent_state.AgentState(record=node_record("alpha"))
    assert agent_machine.refusal(agent, join)
    plan = PlanRecord(plan=PLAN, epoch=1, step=0)
    assert agent_machine.refusal(replace(agent, plans={name: plan}), join) == ""


@pytest.mark.parametrize("name", BAD)
def test_names_that_are_not(name: str) -> None:
    refusal = name_refusal("job", name)
    assert refusal.startswith("job ")
    assert refusal.isprintable()
    assert len(refusal) < 200


@given(st.text(max_size=20))
def test_a_taken_name_goes_into_a_key_a_path_and_a_line(name: str) -> None:
    if not name_refusal("job", name):
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set("/ %?#:\\")
        assert name not in (".", "..")


@pytest.mark.parametrize(
    ("device", "its"),
    [
        *[("a/0", True), ("a/12", True), ("b/0", False), ("a/", False), ("a/x", False), ("a/01", False)],
        *[("a", False), ("a/b/0", False), ("a/-1", False), ("a/" + "9" * 5000, False), ("", False)],
    ],
)
def test_a_devices_name_says_its_node(device: str, its: bool) -> None:
    assert device_of("a", device) == its


def up(device: str, body: Any, job: str = "demo") -> FromClient:
    return FromClient(client="c", job=job, device=device, incarnation="i", body=body)


ALPHA = node_record("alpha")
MEASURED = Measurement(device="beta/0", plan=1, step=1, tokens=1, block_seconds=1.0, block_work=1.0)
WATCHING = Watching(job="demo", torchrun="t", local_rank=0, pid=1, round=1, world=2, nodes=2, least=1)
HELD = Held(job="demo", device="beta/0", incarnation="i", plan=1, step=2, node="beta", size=3)
#: About a device of beta's.
OF_BETA: list[ToLeader] = [
    up("beta/0", Finished(step=99999)),
    up("beta/0", Report(measurement=MEASURED)),
    up("alpha/0", Report(measurement=MEASURED)),
    WorkerLost(job="demo", device="beta/0", incarnation="i", clean=False, how="killed"),
    Frozen(job="demo", device="beta/0", incarnation="i", how="no answer"),
    StepTime(device="beta/0", by=WATCHING, lap=Lap(step=1, seconds=1.0, wall=1.0)),
    AgentHello(
        record=msgspec.structs.replace(node_record("alpha"), devices=(Device(name="beta/0", memory=1),))
    ),
]
#: What alpha may say, though it names others.
OF_ALPHA: list[ToLeader] = [
    up("alpha/1", Finished(step=9)),
    up("", Join(job="demo", min_nodes=1, max_nodes=2, pid=3)),
    WorkerLost(job="demo", device="alpha/0", incarnation="i", clean=True, how=""),
    SnapshotInventory(job="demo", snapshots=(HELD,)),
    Crossed(target="beta", size=1, seconds=1.0, latency=0.1),
    Health(),
    AgentHello(record=node_record("alpha")),
]


@pytest.mark.parametrize("message", OF_BETA, ids=lambda message: type(message).__name__)
def test_a_node_has_no_say_about_anothers_device(message: ToLeader) -> None:
    assert "beta/0" in message_checks.refusal(ALPHA, message, ())


@pytest.mark.parametrize("message", OF_ALPHA, ids=lambda message: type(message).__name__)
def test_a_node_says_what_is_its_own(message: ToLeader) -> None:
    assert message_checks.refusal(ALPHA, message, ()) == ""


def test_a_name_outside_the_grammar_is_heard_of_a_job_that_there_is() -> None:
    """A release before this one may have let it in."""
    said = up("alpha/0", Finished(step=9), job="my job")
    assert "my job" in message_checks.refusal(ALPHA, said, ())
    assert message_checks.refusal(ALPHA, said, ("my job",)) == ""


@pytest.mark.parametrize("device", ["alpha/2", "alpha/999999999"])
def test_a_node_has_no_say_about_a_device_that_its_record_lacks(device: str) -> None:
    assert device in message_checks.refusal(ALPHA, up(device, Finished(step=9)), ())
    lost = WorkerLost(job="demo", device=device, incarnation="i", clean=False, how="killed")
    assert device in message_checks.refusal(ALPHA, lost, ())


CALL = StoreCall(id=1, op="delete", key="plan/1/x")


def test_the_keys_of_a_job_are_heard_of_from_nodes_that_take_part_alone() -> None:
    world = World(("alpha", "beta", "gamma"))
    world.join("alpha")
    world.join("beta")
    world.settle()
    beta, gamma = world.records["beta"], world.records["gamma"]

    def refusal(record: NodeRecord, device: str = "") -> str:
        return message_checks.call_refusal(record, up(device, CALL), world.state.jobs)

    assert refusal(beta) == ""
    assert "gamma takes no part in job demo" in refusal(gamma)
    assert "gamma takes no part in job demo" in refusal(gamma, "gamma/0")
    assert "there is no job 'other'" in message_checks.call_refusal(
        beta, up("", CALL, job="other"), world.state.jobs
    )


def test_a_new_leader_hears_the_calls_of_members_that_it_has_not_met_yet() -> None:
    world = running()
    world.state = coordinator.takeover(
        9, stored(KEYS, world.store.snapshot(KEYS.jobs).items), JobSettings(), 0.0
    )
    for node in ("alpha", "beta"):
        assert message_checks.call_refusal(world.records[node], up(f"{node}/0", CALL), world.state.jobs) == ""
    assert message_checks.call_refusal(node_record("gamma"), up("gamma/0", CALL), world.state.jobs)


@pytest.mark.parametrize(
    "record",
    [
        node_record("a/b"),
        msgspec.structs.replace(node_record("alpha"), node=""),
        node_record("alpha", devices=2000),
        msgspec.structs.replace(node_record("alpha"), devices=(Device(name="alpha/" + "1" * 5000, memory=1),)),
    ],
    ids=["slash", "empty", "too many", "number"],
)
def test_a_record_that_is_none_is_refused(record: Any) -> None:
    assert message_checks.record_refusal(record)


@pytest.mark.parametrize("device", ["alpha/0", "gamma/0", ""])
def test_only_a_member_of_the_plan_ends_the_job(device: str) -> None:
    world = running()
    said = FromClient(client="c", job="demo", device=device, incarnation="stranger", body=Finished(step=7))
    state, _ = coordinator.step(world.state, Received(node="alpha", message=said), world.now)
    assert state.jobs["demo"].phase is JobPhase.RUNNING


def test_a_process_without_a_device_says_what_a_torchrun_says() -> None:
    assert "has no say of 'finished'" in message_checks.refusal(ALPHA, up("", Finished(step=9)), ())


@dataclass
class Broken:
    """A job's machine that fails on one job."""

    job: str
    step: Any = machine.step

    def __call__(self, job: Any, *given: Any) -> Any:
        if job.job == self.job:
            raise ZeroDivisionError("by a worker")
        return self.step(job, *given)


def two_jobs() -> CoordinatorState:
    jobs = {name: fresh(name, JobPhase.GATHERING, 0.0) for name in ("bad", "good")}
    return CoordinatorState(epoch=1, jobs=jobs)


@pytest.mark.usefixtures("defects_are_told")
def test_a_defect_costs_one_job_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "step", Broken("bad"))
    state, effects = coordinator.step(two_jobs(), CoordinatorTick(), 1.0)
    assert state.jobs["bad"].phase is JobPhase.STOPPED
    assert state.jobs["good"].phase is JobPhase.GATHERING
    assert "ZeroDivisionError: by a worker" in state.jobs["bad"].reason
    (note,) = [effect for effect in effects if isinstance(effect, CoordinatorNote)]
    assert (note.kind, note.job) == ("defect", "bad")
    assert "in __call__" in note.data["traceback"]
    assert any(isinstance(e, Write) and isinstance(e.records[-1], DoneRecord) for e in effects)
    again, effects = coordinator.step(state, CoordinatorTick(), 2.0)
    assert (again, effects) == (state, ()), "it is over"


@pytest.mark.usefixtures("defects_are_told")
def test_a_defect_that_a_message_meets_costs_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "step", Broken("bad"))
    before = two_jobs()
    record = node_record("alpha")
    before = msgspec.structs.replace(
        before, nodes={"alpha": coordinator.NodeState(record=record, connected=True, since=0.0)}
    )
    event: Event = Received(node="alpha", message=up("alpha/0", Finished(step=3), job="bad"))
    state, effects = coordinator.step(before, event, 1.0)
    assert state == before
    (note,) = effects
    assert isinstance(note, CoordinatorNote)
    assert "a message of node alpha was dropped" in note.text
