"""A job of two modules in processes: a device that only encodes becomes slow, is seen, and gets fewer images at
once; then its module's layout changes, and a device that both are on dies. Losses and weights are those of one
process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.integration import train_modules
from tests.integration.cluster import SLOW, Cluster
from tests.runtime.image_model import (
    BATCH,
    SEED,
    Captions,
    in_one_process,
    language_sections,
    pipeline,
    plan_of,
    stage,
    vision_sections,
)

SCRIPT = Path(train_modules.__file__)
LANGUAGE = [pipeline(3, stage(0, 5, ("a/1", 1))), pipeline(2, stage(0, 5, ("b/0", 1)))]
PLANS = {
    "": plan_of(
        [pipeline(1, stage(0, 2, ("a/0", 1))), pipeline(1, stage(0, 2, ("b/0", 1)))], LANGUAGE, ahead=2
    ),
    "a/0": plan_of(
        [pipeline(3, stage(0, 2, ("a/1", 1), ("b/0", 1))), pipeline(1, stage(0, 2, ("a/0", 1)))],
        LANGUAGE,
        ahead=3,
        lead=1,
    ),
    "without b/0": plan_of(
        [pipeline(1, stage(0, 2, ("a/1", 1)))],
        [pipeline(5, stage(0, 3, ("a/0", 1)), stage(3, 5, ("a/1", 1)))],
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_device_that_only_encodes_becomes_slow_and_a_device_of_both_dies() -> None:
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=JobSettings(retry_seconds=0.5)) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=6)
        cluster.pace("a/0", SLOW)
        cluster.runs(2, steps=6)
        (slow,) = cluster.events("slow")
        assert slow["data"]["device"] == "a/0"
        shares = [event["data"] for event in cluster.events("shares") if event["data"]["device"] == "a/0"]
        assert shares, said(cluster)
        assert shares[0]["slowdown"] > 1.3, "of its lane; its embedding and head are not slowed down"
        recorded = [event["data"] for event in cluster.events("recorded") if event["data"]["number"] == 2]
        assert shares[0]["step"] <= recorded[0]["step"], "before any layout changes"
        moved = cluster.job()["plan"]["strategies"][0]["modules"]
        assert [len(module["pipelines"][0]["stages"][0]["devices"]) for module in moved] == [2, 1]
        die_and_compare(cluster, plans=3)


@pytest.mark.full  # the test before it takes plans of a script
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_planner_places_both_modules_anew_for_a_slow_device_and_for_a_dead_one() -> None:
    with Cluster({"a": 2, "b": 1}, settings=JobSettings(retry_seconds=0.5)) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=6)
        before = len(cluster.events("recorded"))
        cluster.pace("a/0", SLOW)
        until(lambda: len(cluster.events("recorded")) > before, lambda: said(cluster))
        die_and_compare(cluster)


def said(cluster: Cluster) -> str:
    return str([event["text"] for event in cluster.events()])


def die_and_compare(cluster: Cluster, plans: int | None = None) -> None:
    """A device dies; the job goes on under another plan, and ends. Losses and weights are those of one
    process."""
    before = len(cluster.events("recorded"))
    cluster.workers["b/0"].kill()
    until(lambda: len(cluster.events("recorded")) > before, lambda: said(cluster))
    steps = cluster.finish()
    codes = cluster.wait(120)
    assert codes.pop("b/0") == -signal.SIGKILL
    assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
    torch.manual_seed(0)
    vision, language = vision_sections(), language_sections()
    sampler, data = Sampler(size=len(Captions()), global_batch=BATCH, seed=SEED), Captions()
    losses, weights = in_one_process(
        vision,
        language,
        [[data[index] for index in sampler.samples(step)] for step in range(steps)],
        lr=1e-3,
        weight_decay=0.1,
    )
    paths = cluster.folder.glob("ledger-*")
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    by_step = {line["step"]: line["loss"] for line in lines}
    assert sorted(by_step) == list(range(steps))
    assert plans is None or len({line["plan"] for line in lines}) == plans
    assert [by_step[step] for step in range(steps)] == pytest.approx(losses, abs=1e-10)
    seen: set[str] = set()
    for path in cluster.folder.glob("weights-*"):
        if path.name == "weights-b:0":
            continue
        for name, (start, stop, value) in torch.load(path).items():
            expected = weights[name][Box(start=start, stop=stop).slices(Box.whole(weights[name].shape))]
            assert float((value - expected).abs().max()) < 1e-10, name
            seen.add(name)
    assert seen == set(weights)
