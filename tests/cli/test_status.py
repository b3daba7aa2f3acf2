"""The status screen, on statuses made by hand."""

from __future__ import annotations

import io

import msgspec
import pytest
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Prediction, Stage, Strategy
from rich.console import Console

from elasticd.cli.status import screen
from elasticd.coordinator.api_types import (
    ClusterStatus,
    DeviceStatus,
    JobStatus,
    LeaderStatus,
    MemberStatus,
    NodeStatus,
)
from elasticd.wire.worker import WorkerDevice

PLAN = Plan(
    number=7,
    strategies=(
        Strategy(
            modules=(
                ModulePlan(
                    module="model",
                    pipelines=(
                        Pipeline(
                            stages=(
                                Stage(start=0, stop=3, devices=("a/0", "a/1"), shares=(6, 2)),
                                Stage(start=3, stop=5, devices=("b/0",), shares=(8,)),
                            ),
                            micro_batches=4,
                        ),
                    ),
                ),
            )
        ),
    ),
    micro_batch=1,
    global_batch=4,
    idle=("b/1",),
    prediction=Prediction(step_seconds=1.25, bound_seconds=1.2),
)
STATUS = ClusterStatus(
    cluster="c",
    leader=LeaderStatus(name="one", url="http://127.0.0.1:7471", epoch=3),
    nodes=(
        NodeStatus(
            node="a",
            connected=False,
            address="127.0.0.1",
            emulated=True,
            devices=(DeviceStatus(name="a/1", memory=3 << 20, rate=3.0, pace=3.0),),
        ),
    ),
    jobs=(
        JobStatus(
            job="j",
            phase="running",
            reason="",
            plan=PLAN,
            proposal=8,
            step=41,
            loss=2.5,
            tokens_per_second=1234.5,
            members=(
                MemberStatus(device="a/0", incarnation="x", pid=99),
                MemberStatus(
                    device="a/1",
                    incarnation="y",
                    pid=98,
                    computes_on=WorkerDevice(name="cuda:1", model="NVIDIA H100"),
                ),
            ),
        ),
    ),
)


def shown(status: ClusterStatus, reasons: dict[str, str]) -> str:
    screened = io.StringIO()
    Console(width=160, file=screened).print(screen(status, reasons))
    return screened.getvalue()


@pytest.mark.parametrize(
    "wanted",
    [
        "a/0 pid 99, a/1 pid 98 on cuda:1 (NVIDIA H100) over gloo",
        "leader one at http://127.0.0.1:7471",
        "3.00x",
        "node unreachable, emulated, chaos: 3x slower",
        "step 41   loss 2.5000   tokens/s 1,234",
        "plan 7, 1.250 s a step expected, plan 8 is proposed",
        "0-2 (3)",
        "a/0 75.0%",
        "a/1 3x 25.0%",
        "3-4 (2)",
        "idle b/1",
        "why: it was slow",
        "a/0 pid 99",
    ],
)
def test_screen_shows(wanted: str) -> None:
    assert wanted in shown(STATUS, {"j": "it was slow"})


def test_screen_of_an_empty_cluster_says_what_to_start() -> None:
    assert "elasticd-agent" in shown(msgspec.structs.replace(STATUS, nodes=(), jobs=()), {})


def test_screen_of_a_job_without_a_plan_shows_its_phase_and_reason() -> None:
    job = msgspec.structs.replace(STATUS.jobs[0], plan=None, phase="stopped", reason="a worker died", loss=None)
    said = shown(msgspec.structs.replace(STATUS, jobs=(job,)), {})
    assert "job j  stopped  a worker died" in said
    assert "loss -" in said
