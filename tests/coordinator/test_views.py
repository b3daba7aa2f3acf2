"""What the status says of devices (their rates, the kind of slowness they have, how many of a node work) and of
whom a job waits for."""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.slowness_history import Episode
from elasticd_planner.detection.stragglers import DetectSettings, DeviceRate, RateState

from elasticd.coordinator.status import status
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.state.job_state import JobPhase, JobSettings, JobState, NodeState, Worker, fresh
from elasticd.wire.api_types import DeviceStatus, LeaderStatus
from elasticd.wire.main_thread import Halted
from tests.cli.test_status import PLAN
from tests.machines.cast import node_record

LEADER = LeaderStatus(name="c0", url="http://127.0.0.1:1", epoch=1)
FLAPPING = tuple(Episode(start=start, stop=start + 12, rate=2.0) for start in (20, 50, 80, 110))


def devices(rates: RateState, persistent_steps: int = 200) -> dict[str, DeviceStatus]:
    job = msgspec.structs.replace(fresh("j", JobPhase.RUNNING, 0.0), plan=PLAN).changed(
        "detection", rates=rates
    )
    nodes = {
        name: NodeState(record=node_record(name), connected=True, since=0.0) for name in ("a", "b", "unused")
    }
    settings = JobSettings(detect=DetectSettings(persistent_steps=persistent_steps))
    found = status(
        CoordinatorState(epoch=1, nodes=nodes, jobs={"j": job}, settings=settings),
        "c",
        LEADER,
        (),
        0.0,
        0.0,
        {},
    )
    assert {node.node: node.members for node in found.nodes} == {"a": 2, "b": 1, "unused": 0}
    return {device.name: device for node in found.nodes for device in node.devices}


def test_kinds_of_slowness_are_told_apart_in_the_status() -> None:
    slow_now = (Episode(start=100, stop=None, rate=1.5),)
    rates = RateState(
        devices={
            "a/0": DeviceRate(episodes=FLAPPING),
            "a/1": DeviceRate(rate=1.5, episodes=slow_now),
            "b/0": DeviceRate(spikes=(30,)),
            "b/1": DeviceRate(residuals=(0.0,)),
        },
        step=150,
    )
    found = devices(rates)
    kinds = {name: known.slowness.kind for name, known in found.items() if known.slowness is not None}
    assert kinds == {"a/0": "periodic", "a/1": "one-off", "b/0": "one-off"}
    periodic = found["a/0"].slowness
    assert periodic is not None
    assert periodic.period == 30
    assert found["a/1"].rate == 1.5


def test_chronic_is_what_the_settings_say() -> None:
    rates = RateState(
        devices={"a/0": DeviceRate(rate=1.5, episodes=(Episode(start=100, stop=None, rate=1.5),))}, step=150
    )
    found = devices(rates, persistent_steps=50)["a/0"].slowness
    assert found is not None
    assert found.kind == "chronic"


def reason(job: JobState, at: float, limit: float = 0.0) -> str:
    settings = JobSettings(detect=DetectSettings(outside_seconds=limit))
    (found,) = status(
        CoordinatorState(epoch=1, jobs={"j": job}, settings=settings), "c", LEADER, (), 0.0, at, {}
    ).jobs
    return found.reason


def test_a_job_that_waits_for_a_worker_outside_of_a_step_says_so() -> None:
    plan = PLAN.replace(binding=dict.fromkeys(PLAN.members, "1f"))
    first = PLAN.members[0]
    workers = {}
    for device in PLAN.members:
        place = "the optimizer's factory" if device == first else "a collective"
        halted = Halted(job="j", device=device, incarnation="1f", place=place, waits=device != first)
        workers[device] = Worker(
            device=device, incarnation="1f", node="a", client="w", pid=1, halted=halted, halted_at=100.0
        )
    job = msgspec.structs.replace(fresh("j", JobPhase.RUNNING, 0.0), plan=plan, workers=workers)
    assert reason(job, 101.0) == ""
    assert reason(job, 112.0) == f"waits for worker {first}, which is in the optimizer's factory for 12 s"
    assert reason(msgspec.structs.replace(job, reason="its own"), 112.0) == "its own"
    assert reason(msgspec.structs.replace(job, phase=JobPhase.STOPPED), 112.0) == ""
    loads = Halted(job="j", device="", incarnation="1f", place="its loader")
    workers = {device: msgspec.structs.replace(worker, halted=loads) for device, worker in workers.items()}
    job = msgspec.structs.replace(job, workers=workers)
    assert "most of the job's stand still" not in reason(job, 160.0, limit=90.0)
    assert "most of the job's stand still" in reason(job, 160.0, limit=50.0)


def test_a_device_is_as_slow_as_the_job_measures_that_runs() -> None:
    """A job that is over measures nothing any more, whatever it measured at its end."""
    slow = RateState(devices={"a/0": DeviceRate(rate=4.6)})
    over = fresh("before", JobPhase.DONE, 0.0).changed("detection", rates=slow)
    runs = fresh("now", JobPhase.RUNNING, 0.0)
    state = CoordinatorState(epoch=1, jobs={"before": over, "now": runs})
    assert state.slowdowns == {}
    runs = runs.changed("detection", rates=slow)
    state = CoordinatorState(epoch=1, jobs={"before": over, "now": runs})
    assert state.slowdowns == {"a/0": 4.6}
