"""Faults of whole jobs on a device whose communicators have NCCL's rules: what hangs is aborted, and nothing
that an aborted operation wrote is believed. Survivors go on from the last decided step, exactly."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from elasticd_planner.layout.channels import channels
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.models import Decoder
from elasticd.testing.waiting import until
from tests import sizes
from tests.accelerators import vgpu
from tests.integration import train
from tests.integration.cluster import SLOW, Cluster
from tests.integration.test_switch import check_exactness, plan_of, stage

SETTINGS = JobSettings(retry_seconds=0.5)
#: The device that dies or freezes.
LOST = "a/1"


def plans(zero: int) -> dict[str, Plan]:
    """The first plan has a TP group and a stage boundary, the second other widths."""
    state = StatePolicy(zero=zero, replicas=2) if zero else StatePolicy()
    made = {
        "": plan_of(
            (2, [stage(0, 2, ("a/0", 5), (LOST, 3)), stage(2, 3, ("b/0", 1))]),
            (1, [stage(0, 3, ("b/1", 1))]),
        ),
        "b/1": plan_of(
            (2, [stage(0, 1, ("a/0", 1)), stage(1, 3, (LOST, 1), ("b/0", 1))]),
            (1, [stage(0, 3, ("b/1", 1))]),
        ),
        f"without {LOST}": plan_of(
            (2, [stage(0, 2, ("a/0", 1)), stage(2, 3, ("b/0", 1))]), (1, [stage(0, 3, ("b/1", 1))])
        ),
    }
    return {name: plan.replace(state=state) for name, plan in made.items()}


def connections(plan: Plan) -> int:
    """Communicators of the lost device under a first plan, and that of the move to it."""
    return len(channels(Layouts(Decoder(train.CONFIG).describe().spec, plan), LOST)) + 1


def lanes(zero: int) -> dict[str, Plan]:
    """Four lanes on two nodes, and three. Keys of one node go to the other once, and are passed on there."""
    state = StatePolicy(zero=zero, replicas=2) if zero else StatePolicy()

    def made(rows: tuple[int, ...], *devices: str) -> Plan:
        ones = (1,) * len(devices)
        whole = Stage(start=0, stop=3, devices=devices, shares=ones, lanes=ones)
        pipeline = Pipeline(stages=(whole,), micro_batches=sum(rows), rows=rows)
        strategy = Strategy(modules=(ModulePlan(module="model", pipelines=(pipeline,)),))
        return Plan(number=0, strategies=(strategy,), micro_batch=1, global_batch=train.BATCH, state=state)

    return {
        "": made((2, 2, 1, 1), "a/0", LOST, "b/0", "b/1"),
        f"without {LOST}": made((2, 2, 2), "a/0", "b/0", "b/1"),
    }


#: Of a job whose sequences no lane holds.
CUTS = {"job": {"data": {"packing": {"tokens": 6, "least": 1}}}, "micro_batch": 1}
#: Where it is struck: (launches that begin so, which of them, ZeRO stage). Its TP group has about 16 in a step.
MOMENTS = {
    "TP, forward": ("all_reduce tensor", 5 * 16 + 2, 0),
    "TP, backward": ("all_reduce tensor", 5 * 16 + 12, 0),
    "reduction": ("all_reduce reduce", 9, 0),
    "a gradient to the stage before": ("recv gradient", 7, 1),
    "ZeRO's deliveries": ("batch state", 9, 1),
    "ZeRO 2's deliveries": ("batch state", 12, 2),
}
#: The same while sequences are cut over it.
CUT_MOMENTS = {
    "keys": ("batch context", 151, 0),
    "gradients of keys": ("batch context", 163, 1),
    "a reduction between lanes": ("all_reduce reduce", 9, 0),
}


HOW = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "how"),
    sizes.beside([("ZeRO's deliveries", "killed")], [(moment, how) for moment in MOMENTS for how in HOW]),
)
def test_survivors_of_a_step_go_on_exactly(moment: str, how: str) -> None:
    survived(moment, how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "how"),
    sizes.beside([("gradients of keys", "frozen")], [(moment, how) for moment in CUT_MOMENTS for how in HOW]),
)
def test_survivors_of_cut_sequences_go_on_exactly(moment: str, how: str) -> None:
    survived(moment, how)


class Survival(NamedTuple):
    """Seconds of a drill: until each survivor's device was at rest after its communicators were aborted; from
    the leader's order to stop until the next plan stood."""

    rest: list[float]
    standing: float


def survived(moment: str, how: str, kind: str = "vgpu") -> Survival:
    """One drill, with all that it must keep, on this kind of device."""
    what, count, zero = (MOMENTS | CUT_MOMENTS)[moment]
    cut = moment in CUT_MOMENTS
    made = lanes(zero) if cut else plans(zero)
    with Cluster({"a": 2, "b": 2}, plans=made, settings=SETTINGS) as cluster:
        start(cluster, (what, count, HOW[how]), CUTS if cut else {}, kind)
        until(lambda: len(cluster.events("recorded")) == 2, lambda: told(cluster))
        (fenced, *_), recorded = cluster.events("fenced"), cluster.events("recorded")
        assert fenced["data"]["gone"] == [LOST]
        logs = [cluster.log(device) for device in cluster.workers if device != LOST]
        gone_on(cluster, plans=2)
    rest = [float(found) for log in logs for found in re.findall(r"came to rest in ([0-9.]+) s", log)]
    return Survival(rest=rest, standing=recorded[1]["time"] - fenced["time"])


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("nth", [1, 2], ids=["first", "second"])
def test_a_death_while_communicators_connect_costs_one_device(nth: int) -> None:
    made = plans(0)
    with Cluster({"a": 2, "b": 2}, plans=made, settings=SETTINGS) as cluster:
        start(cluster, ("connect", connections(made[""]) + nth, signal.SIGKILL), {})
        lost_in_a_switch(cluster)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("nth", [1, 3], ids=["first round", "third round"])
def test_a_death_in_a_move_costs_one_device(nth: int) -> None:
    """Nothing else goes over a communicator of all members under this policy."""
    with Cluster({"a": 2, "b": 2}, plans=plans(0), settings=SETTINGS) as cluster:
        drill = {"drill": ("state", nth, signal.SIGKILL)}
        cluster.run(Path(train.__file__), **options(), **{LOST: drill}, round=4096)
        lost_in_a_switch(cluster)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 2])
def test_a_switch_under_the_rules_is_exact(zero: int) -> None:
    switched(zero)


def switched(zero: int, kind: str = "vgpu") -> None:
    """A job whose plan changes, on this kind of device."""
    with Cluster({"a": 2, "b": 2}, plans=plans(zero), settings=SETTINGS) as cluster:
        cluster.run(Path(train.__file__), **options(kind=kind))
        cluster.runs(1, steps=5)
        cluster.pace("b/1", SLOW)
        cluster.runs(2, steps=3)
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check_exactness(cluster, steps, plans=2)


def options(job: Mapping[str, Any] = {}, *, kind: str = "vgpu", **more: Any) -> dict[str, Any]:
    if kind == "cuda":
        return {"gpu": "nccl", "job": {"parallelism": {"device": "cuda:0"}, **job}, **more}
    vgpu.needed()
    return {"vgpu": "strict", "job": {"parallelism": {"device": "vgpu"}, **job}, **more}


def start(cluster: Cluster, drill: tuple[str, int, int], more: Mapping[str, Any], kind: str = "vgpu") -> None:
    cluster.run(Path(train.__file__), **options(**more, kind=kind), **{LOST: {"drill": drill}})


def told(cluster: Cluster) -> str:
    logs = "\n".join(f"{device}: {cluster.log(device)[-1500:]}" for device in cluster.workers)
    return f"{[event['text'] for event in cluster.events()]}\n{logs}"


def lost_in_a_switch(cluster: Cluster) -> None:
    """A switch begins, in which the device is struck; the others go on."""
    cluster.runs(1, steps=5)
    cluster.pace("b/1", SLOW)
    until(
        lambda: cluster.events("fenced") and cluster.job()["phase"] in ("running", "done"),
        lambda: told(cluster),
    )
    gone_on(cluster, plans=2)


def gone_on(cluster: Cluster, plans: int) -> None:
    steps = cluster.finish()
    cluster.workers[LOST].kill()  # a frozen one, too
    codes = cluster.wait(120)
    assert codes.pop(LOST) == -signal.SIGKILL
    assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
    check_exactness(cluster, steps, plans=plans)
