"""A job switches plans in place, driven by the real machines, agents and workers, and stays exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.models import DecoderConfig
from elasticd.testing.waiting import until
from tests import sizes
from tests.integration import train
from tests.integration.cluster import SLOW, Cluster

SCRIPT = Path(train.__file__)
SETTINGS = JobSettings(retry_seconds=0.5)


def stage(start: int, stop: int, *members: tuple[str, int], lanes: tuple[int, ...] = ()) -> Stage:
    devices, shares = (tuple(each) for each in zip(*members, strict=True))
    return Stage(start=start, stop=stop, devices=devices, shares=shares, lanes=lanes)


def plan_of(*pipelines: tuple[int | tuple[int, ...], list[Stage]], idle: tuple[str, ...] = ()) -> Plan:
    """Pipelines as (micro-batches, or those of each lane; stages)."""
    rows = [count if isinstance(count, tuple) else (count,) for count, _ in pipelines]
    made = tuple(
        Pipeline(stages=tuple(stages), micro_batches=sum(own), rows=own)
        for own, (_, stages) in zip(rows, pipelines, strict=True)
    )
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=made),))
    return Plan(number=0, strategies=(strategy,), micro_batch=train.MICRO, global_batch=train.BATCH, idle=idle)


PLANS = {
    # two unlike pipelines on all five devices
    "": plan_of(
        (2, [stage(0, 2, ("a/0", 1), ("a/1", 1)), stage(2, 3, ("a/2", 1))]),
        (1, [stage(0, 3, ("b/0", 1), ("b/1", 1))]),
    ),
    # one pipeline of unequal shares; a/2 leaves and stands by
    "a/1": plan_of(
        (3, [stage(0, 1, ("a/0", 6), ("a/1", 2)), stage(1, 3, ("b/0", 1), ("b/1", 1))]), idle=("a/2",)
    ),
    # a/2 joins again, everything else moves too: one pipeline of two lanes
    "b/0": plan_of(
        (
            (2, 1),
            [
                stage(0, 1, ("a/0", 5), ("a/1", 3), ("b/0", 1), lanes=(2, 1)),
                stage(1, 3, ("a/2", 1), ("b/1", 1), lanes=(1, 1)),
            ],
        ),
    ),
}


@pytest.mark.full  # test_zero_switches moves more; devices stand by in test_mixed_precision and test_own_loop
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_plans_switch_in_place_and_training_stays_that_of_one_process() -> None:
    with Cluster({"a": 3, "b": 2}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=12)
        pids = {member["device"]: member["pid"] for member in cluster.job()["members"]}
        cluster.slow("a/1")
        cluster.runs(2, steps=3)
        cluster.pace("b/0", SLOW)
        cluster.pace("a/1", 1.0)
        until_third(cluster)
        assert {member["device"]: member["pid"] for member in cluster.job()["members"]} == pids
        steps = cluster.finish()
        codes = cluster.wait(300)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        check_exactness(cluster, steps)
        swapped = cluster.events("swapped")
        for number in {event["data"]["number"] for event in swapped} - {1}:
            data = [event["data"] for event in swapped if event["data"]["number"] == number]
            sent, lacking = (sum(d[key] for d in data) for key in ("bytes_sent", "bytes_lacking"))
            assert 0 < lacking < sent < 1.02 * lacking, "what was lacking, once, and its checksums"
        assert cluster.events("finished")


def until_third(cluster: Cluster) -> None:
    """Plan 3 or a later one uses a/2 again."""

    def there() -> bool:
        plan = cluster.job().get("plan")
        return bool(plan) and plan["number"] >= 3 and "a/2" in plan["binding"]

    until(there, lambda: f"a/2 joins again: {[e['text'] for e in cluster.events()]}")


def check_exactness(cluster: Cluster, steps: int, plans: int = 3, config: DecoderConfig = train.CONFIG) -> None:
    lines = ledger(cluster)
    assert [line["step"] for line in lines] == list(range(steps)), "each step once, whoever had rank 0"
    assert worst_difference(cluster, steps, config) < 1e-10
    assert len({line["plan"] for line in lines}) >= plans
    sampler = Sampler(size=len(train.Text()), global_batch=train.BATCH, seed=train.SEED)
    for line in lines:
        assert sorted(line["samples"]) == sorted(sampler.samples(line["step"])), f"step {line['step']}"


def ledger(cluster: Cluster) -> list[dict[str, Any]]:
    """What the ranks 0 wrote down of each step, in the order of plans and steps."""
    paths = cluster.folder.glob("ledger-*")
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["plan"], line["step"]))


def worst_difference(cluster: Cluster, steps: int, config: DecoderConfig = train.CONFIG) -> float:
    """Between all losses and last weights of a job that ended, and those of plain torch in one process."""
    losses, weights = train.reference(steps, config)
    apart = [abs(line["loss"] - losses[line["step"]]) for line in ledger(cluster)]
    held = 0
    for path in cluster.folder.glob("weights-*"):
        for name, (start, stop, value) in torch.load(path).items():
            expected = weights[name][Box(start=start, stop=stop).slices(Box.whole(weights[name].shape))]
            apart.append(float((value - expected).abs().max()))
            held += 1
    assert held
    return max(apart)


@pytest.mark.slow
@pytest.mark.parametrize("moment", sizes.beside(["moving"], ["preparing", "moving"]))
def test_a_plan_that_one_rank_refuses_is_given_up_and_training_goes_on_exactly(moment: str) -> None:
    plans = {
        "": plan_of((2, [stage(0, 3, ("a/0", 1), ("a/1", 1))]), (1, [stage(0, 3, ("b/0", 1))])),
        "a/1": plan_of((3, [stage(0, 2, ("a/0", 6), ("a/1", 2)), stage(2, 3, ("b/0", 1))])),
    }
    settings = JobSettings(retry_seconds=300)
    with Cluster({"a": 2, "b": 1}, plans=plans, settings=settings) as cluster:
        cluster.run(SCRIPT, **{"b/0": {"refuse": moment}})
        cluster.runs(1, steps=12)
        cluster.slow("a/1")
        until(lambda: cluster.events("aborted"), lambda: str([e["text"] for e in cluster.events()]))
        until(lambda: cluster.job()["phase"] == "running")
        assert cluster.job()["plan"]["number"] == 1
        steps = cluster.finish()
        codes = cluster.wait()
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        assert [event["data"]["number"] for event in cluster.events("recorded")] == [1]
        check_exactness(cluster, steps, plans=1)
