"""The status screen, on statuses made by hand."""

from __future__ import annotations

import io

import msgspec
import pytest
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Prediction, Stage, Strategy
from rich.console import Console

from elasticd.cli.status import screen, status_of
from elasticd.wire.api_types import (
    ClusterStatus,
    DeviceStatus,
    JobStatus,
    LeaderStatus,
    MemberStatus,
    NodeStatus,
)
from elasticd.wire.node_health import DeviceHealth, Health
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
            step_seconds=0.5,
            wall_seconds=0.8,
            predicted_seconds=0.45,
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
        "wall time a step 0.800 s   the step itself 0.500 s",
        "plan 7, 0.450 s a step predicted (1.250 s when it was made), plan 8 is proposed",
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


def test_a_prediction_before_steps_were_measured_is_called_a_guess_with_digits_that_say_something() -> None:
    plan = PLAN.replace(prediction=Prediction(step_seconds=4.6e-5, bound_seconds=4.6e-5))
    (job,) = STATUS.jobs
    job = msgspec.structs.replace(job, plan=plan, predicted_seconds=4.6e-5, prediction_guessed=True)
    said = shown(msgspec.structs.replace(STATUS, jobs=(job,)), {})
    assert "plan 7, 46 µs a step, a guess before steps were measured, plan 8 is proposed" in said


def test_screen_of_an_empty_cluster_says_what_to_start() -> None:
    assert "elasticd-agent" in shown(msgspec.structs.replace(STATUS, nodes=(), jobs=()), {})
    taken_over = shown(msgspec.structs.replace(STATUS, nodes=()), {})
    assert "come to a new leader by themselves" in taken_over
    assert all(f"job {job.job}" in taken_over for job in STATUS.jobs), "a new leader knows them from the store"


def test_screen_of_a_job_without_a_plan_shows_its_phase_and_reason() -> None:
    job = msgspec.structs.replace(STATUS.jobs[0], plan=None, phase="assembling", reason="a node", loss=None)
    said = shown(msgspec.structs.replace(STATUS, jobs=(job,)), {})
    assert "job j  assembling  a node" in said
    assert "loss -" in said


def test_jobs_that_run_come_first_and_in_full_and_those_that_are_over_in_a_line_each() -> None:
    replace = msgspec.structs.replace
    (runs,) = STATUS.jobs
    ended = [
        replace(runs, job=f"a{n}", phase="stopped", stopping=False, reason=f"a worker died\n{n}", loss=None)
        for n in "01"
    ]
    status = replace(STATUS, jobs=(*ended, runs))
    lines = shown(status, {}).splitlines()
    (first,) = [number for number, line in enumerate(lines) if "job j  running" in line]
    over = [number for number, line in enumerate(lines) if "failed" in line]
    assert first < over[0]
    assert [lines[number].split() for number in over] == [
        [f"a{n}", "failed", "step", "41", "loss", "-", "a", "worker", f"died\\n{n}"] for n in "01"
    ]
    assert sum("workers" in line for line in lines) == 1, "only the job that runs is drawn"
    everything = drawn(status, everything=True)
    assert sum("workers" in line for line in everything) == 3
    narrow = io.StringIO()
    Console(width=40, file=narrow).print(screen(status, {}))
    cut = [line.rstrip() for line in narrow.getvalue().splitlines() if "failed" in line]
    assert cut == [f"a{n}  failed  step 41  loss -  a worker d…" for n in "01"], "the reason is cut, no more"
    many = replace(STATUS, jobs=tuple(replace(ended[0], job=f"a{n}") for n in range(30)))
    assert "further jobs that are over: 20; elasticd jobs shows all" in shown(many, {})


def test_one_job_is_shown_in_full_also_when_it_is_over_with_the_devices_that_it_has_alone() -> None:
    replace = msgspec.structs.replace
    device = DeviceStatus(name="a/7", memory=3 << 20, rate=1.0, pace=1.0)
    (node,), (job,) = STATUS.nodes, STATUS.jobs
    spare = replace(node, node="c", devices=(replace(device, name="c/0"),))
    over = replace(job, phase="stopped", stopping=False, reason="a worker died")
    nodes = (replace(node, devices=(*node.devices, device)), spare)
    status = replace(STATUS, jobs=(over, replace(job, job="other")), nodes=nodes)
    alone = status_of(status, "j")
    lines = drawn(alone, one=True)
    assert any("job j  failed  a worker died" in line for line in lines)
    assert not any("other" in line for line in lines)
    assert [node.node for node in alone.nodes] == ["a"]
    assert [device.name for device in alone.nodes[0].devices] == ["a/1"]


def test_each_device_has_its_job_rank_memory_load_and_temperature() -> None:
    replace = msgspec.structs.replace
    health = Health(
        devices=(
            DeviceHealth(name="a/0", memory_used=5 << 30, utilisation=0.971, temperature=61.4),
            DeviceHealth(name="a/1", memory_used=300 << 20, utilisation=1.5),
        )
    )
    device = DeviceStatus(name="a/0", memory=80 << 30, rate=1.0, pace=1.0)
    nodes = tuple(
        replace(
            STATUS.nodes[0],
            node=node,
            connected=True,
            emulated=False,
            health=health if node == "a" else None,
            devices=tuple(replace(device, name=f"{node}/{index}") for index in range(2)),
        )
        for node in "abc"
    )
    lines = [line.split() for line in shown(replace(STATUS, nodes=nodes), {}).splitlines()[1:8]]
    assert lines == [
        ["device", "job", "rank", "memory", "busy", "temp", "takes"],
        ["a/0", "j", "0", "5", "GiB", "/", "80", "GiB", "97%", "61", "°C", "1.00x"],
        ["a/1", "j", "1", "300", "MiB", "/", "80", "GiB", "150%", "-", "1.00x"],
        ["b/0", "j", "2", "80", "GiB", "-", "-", "1.00x"],
        ["b/1", "j", "standby", "80", "GiB", "-", "-", "1.00x"],
        ["c/0", "-", "-", "80", "GiB", "-", "-", "1.00x"],
        ["c/1", "-", "-", "80", "GiB", "-", "-", "1.00x"],
    ]
    away = replace(STATUS, nodes=tuple(replace(node, connected=False) for node in nodes))
    assert "97%" not in shown(away, {}), "an old reading of a node that is away is no reading"


def large() -> ClusterStatus:
    """1,000 nodes of 8 devices, every tenth node with a slow one, and a job on all of them."""
    names = [f"n{number:04d}" for number in range(1000)]
    nodes = tuple(
        NodeStatus(
            node=name,
            connected=number != 7,
            draining=number == 11,
            members=8,
            address="127.0.0.1",
            emulated=False,
            devices=tuple(
                DeviceStatus(
                    name=f"{name}/{rank}",
                    memory=80 << 30,
                    rate=1.5 if number % 10 == 0 and rank == 3 else 1.0,
                    pace=1.0,
                )
                for rank in range(8)
            ),
        )
        for number, name in enumerate(names)
    )
    pipelines = tuple(
        Pipeline(
            stages=tuple(
                Stage(start=s, stop=s + 1, devices=tuple(f"{name}/{r}" for r in range(8)), shares=(1,) * 8)
                for s, name in enumerate(names[first : first + 10])
            ),
            micro_batches=1,
        )
        for first in range(0, 1000, 10)
    )
    plan = Plan(
        number=1,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),),
        micro_batch=1,
        global_batch=100,
    )
    members = tuple(
        MemberStatus(device=device.name, incarnation="i", pid=1) for node in nodes for device in node.devices
    )
    job = msgspec.structs.replace(STATUS.jobs[0], job="big", plan=plan, members=members)
    return msgspec.structs.replace(STATUS, nodes=nodes, jobs=(job,) * 9)


def drawn(found: ClusterStatus, **options: bool) -> list[str]:
    console = Console(width=120, file=io.StringIO())
    console.print(screen(found, {"big": "why it was made"}, **options))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue().splitlines()


def test_a_thousand_nodes_have_sixty_lines_that_say_what_is_not_normal() -> None:
    lines = drawn(large())
    assert len(lines) <= 60
    text = "\n".join(lines)
    assert "1,000 nodes, 8,000 devices: 7,900 at normal speed, 100 slow, 1 nodes unreachable" in text
    (away,) = [line for line in lines if line.startswith("  n0007 ")]
    assert "××××××××" in away
    assert "node unreachable" in away
    (slow,) = [line for line in lines if line.startswith("  n0010 ")]
    assert "▁▁▁▃▁▁▁▁" in slow
    assert "n0010/3 takes 1.50x" in slow
    assert not any(line.startswith("  n0001 ") for line in lines), "nothing is wrong with it"
    assert "more nodes that are not normal: --all" in text
    assert "100 pipelines of 10 stages on 8,000 devices" in text
    assert "and 5 more jobs that run: elasticd jobs" in text


def test_all_shows_every_device_also_of_a_large_cluster() -> None:
    few = msgspec.structs.replace(large(), nodes=large().nodes[:60], jobs=())
    lines = drawn(few, everything=True)
    assert sum("/" in line and "80 GiB" in line for line in lines) == 480
    assert len(drawn(few)) < 60
