"""Jobs whose plans are written as annotations, in processes: given, switched, and one rank killed."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from elasticd_planner.spec.plan import Plan

from elasticd.annotations import Annotation, plan_of
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.models import Decoder
from elasticd.testing.waiting import until
from tests.integration import train
from tests.integration.cluster import Cluster
from tests.integration.test_switch import check_exactness

SCRIPT = Path(train.__file__)
SETTINGS = JobSettings(retry_seconds=0.5)
CONFIG = replace(train.CONFIG, layers=8)
#: Samples of a step; micro-batches are of `train.MICRO`.
BATCH = train.BATCH


def annotated(*pipelines: tuple[int, list[tuple[tuple[str, ...], int]]]) -> Plan:
    """Pipelines as (micro-batches, [(TP group, blocks)]), written as annotations of the model's parameters."""
    edges = sorted({sum(count for _, count in stages[:n]) for _, stages in pipelines for n in range(1, 9)})
    written: dict[str, Annotation] = {}
    start = 0
    for stop in edges:
        groups = [_group_of(stages, start) for _, stages in pipelines]
        states = [{"tp": len(group)} if len(group) > 1 else {} for group in groups]
        written[f"blocks.{start}-{stop - 1}.*"] = Annotation(groups=groups, states=states)
        start = stop
    first, last = next(iter(written.values())), next(reversed(written.values()))
    with torch.device("meta"):
        model = Decoder(CONFIG).describe()
    return plan_of(
        model,
        {**written, "embed.*": first, "head.*": last},
        micro_batches=[count for count, _ in pipelines],
        micro_batch=train.MICRO,
    )


def _group_of(stages: list[tuple[tuple[str, ...], int]], layer: int) -> tuple[str, ...]:
    for group, count in stages:
        if layer < count:
            return group
        layer -= count
    raise AssertionError("no stage has this block")


#: HSPMD's unlike pipelines: one of TP 2 x 5 blocks and TP 2 x 3, one of TP 2 x 6 and TP 1 x 2.
A = [(("a/0", "a/1"), 5), (("a/2", "a/3"), 3)]
B = [(("b/0", "b/1"), 6), (("b/2",), 2)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_seven_ranks_train_a_given_plan_exactly_and_go_on_without_one_that_is_killed() -> None:
    both = annotated((1, A), (2, B))
    options = {"plan": msgspec.to_builtins(both), "keep_plan": True}
    with Cluster({"a": 4, "b": 3}, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, layers=8, job={"parallelism": options})
        cluster.runs(1, steps=5)
        plan = cluster.job()["plan"]
        assert plan["reason"].startswith("given by the job")
        assert len(plan["binding"]) == 7
        cluster.workers["b/2"].kill()
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        assert "b/2" not in cluster.job()["plan"]["binding"]
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert codes.pop("b/2") == -signal.SIGKILL
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check_exactness(cluster, steps, plans=2, config=CONFIG)


@pytest.mark.full  # the given plan above is made and checked the same way
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_annotated_plan_switches_to_another_on_other_ranks() -> None:
    plans = {"": annotated((3, A)), "a/1": annotated((3, B))}
    with Cluster({"a": 4, "b": 3}, plans=plans, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, layers=8)
        cluster.runs(1, steps=12)
        cluster.slow("a/1")
        cluster.runs(2, steps=3)
        assert sorted(cluster.job()["plan"]["binding"]) == ["b/0", "b/1", "b/2"]
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check_exactness(cluster, steps, plans=2, config=CONFIG)
