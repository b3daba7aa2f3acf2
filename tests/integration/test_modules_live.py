"""A job of two modules in processes: a device that only encodes becomes slow, is seen, and gets fewer images at
once; then its module's layout changes, and a device that both are on dies. Losses and weights are those of one
process."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests import forkserver, sizes
from tests.integration import train_modules
from tests.integration.cluster import ROOT, Cluster
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
#: How near losses and weights of a model are that computes norms and rotary tables in single precision.
SINGLE = 1e-6


def plans_of(layers: int) -> dict[str, Plan]:
    """By the slow or dead device, for a language model of so many layers beside an encoder of two."""
    language = [pipeline(3, stage(0, layers, ("a/1", 1))), pipeline(2, stage(0, layers, ("b/0", 1)))]
    encoder = [pipeline(1, stage(0, 2, ("a/0", 1))), pipeline(1, stage(0, 2, ("b/0", 1)))]
    moved = [pipeline(3, stage(0, 2, ("a/1", 1), ("b/0", 1))), pipeline(1, stage(0, 2, ("a/0", 1)))]
    return {
        "": plan_of(encoder, language, ahead=2),
        "a/0": plan_of(moved, language, ahead=3, lead=1),
        "without b/0": plan_of(
            [pipeline(1, stage(0, 2, ("a/1", 1)))],
            [pipeline(5, stage(0, 2, ("a/0", 1)), stage(2, layers, ("a/1", 1)))],
        ),
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", sizes.beside(["by hand"], ["by hand", "vlm"]))
def test_a_device_that_only_encodes_becomes_slow_and_a_device_of_both_dies(model: str) -> None:
    """ "vlm": examples/train_vlm.py, a vision-language model of transformers."""
    plans = plans_of(5 if model == "by hand" else 3)
    with Cluster({"a": 2, "b": 1}, plans=plans, settings=JobSettings(retry_seconds=0.5)) as cluster:
        cluster.run(SCRIPT, model=model)
        cluster.runs(1, steps=6)
        first = layouts_of(cluster)
        cluster.slow("a/0")
        cluster.runs(2, steps=6)
        # Others may have been slow besides, on a busy machine.
        assert "a/0" in {event["data"]["device"] for event in cluster.events("slow")}, said(cluster)
        shares = [event["data"] for event in cluster.events("shares") if event["data"]["device"] == "a/0"]
        assert shares, said(cluster)
        slowdown = max(each["slowdown"] for each in shares)
        assert slowdown > 1.3, "of its lane; its embedding and head are not slowed down"
        recorded = [event["data"] for event in cluster.events("recorded") if event["data"]["number"] == 2]
        assert shares[0]["step"] <= recorded[0]["step"], "before any layout changes"
        assert [name for name, each in layouts_of(cluster).items() if each != first[name]] == ["vision"]
        steps = die_and_finish(cluster)
        if model == "by hand":
            compare(cluster, steps, *by_hand(steps), near=1e-10)
        else:
            compare(cluster, steps, *alone(cluster.folder / "alone", steps), near=SINGLE)
        assert len({line["plan"] for line in ledger_of(cluster.folder)}) == 3


@pytest.mark.full  # the test before it takes plans of a script
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["by hand", "vlm"])
def test_the_planner_places_both_modules_anew_for_a_slow_device_and_for_a_dead_one(model: str) -> None:
    with Cluster({"a": 2, "b": 1}, settings=JobSettings(retry_seconds=0.5)) as cluster:
        cluster.run(SCRIPT, model=model)
        cluster.runs(1, steps=6)
        cluster.slow("a/0")
        slow = until(
            lambda: [each for each in cluster.events("slow") if each["data"]["device"] == "a/0"],
            lambda: said(cluster),
        )
        until(
            lambda: [each for each in cluster.events("recorded") if each["id"] > slow[0]["id"]],
            lambda: said(cluster),
        )
        steps = die_and_finish(cluster)
        if model == "by hand":
            compare(cluster, steps, *by_hand(steps), near=1e-10)
        else:
            compare(cluster, steps, *alone(cluster.folder / "alone", steps), near=SINGLE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", sizes.beside(["by hand"], ["by hand", "vlm"]))
def test_the_planner_places_both_modules_and_places_them_anew_for_a_dead_device(model: str) -> None:
    """Losses and weights are those of one process; of "vlm", of `python examples/train_vlm.py`."""
    if model == "vlm":
        pytest.importorskip("transformers")
        pytest.importorskip("sklearn")
    with Cluster({"a": 2, "b": 1}, settings=JobSettings(retry_seconds=0.5)) as cluster:
        # The example has snapshots, too: the planner may leave each part of the state on one device.
        cluster.run(SCRIPT, model=model, job={"checkpointing": {"snapshot_every": 2}})
        cluster.runs(1, steps=6)
        until(lambda: cluster.job()["snapshot"] is not None, lambda: said(cluster))
        assert set(layouts_of(cluster)) == {"vision", "language"}
        steps = die_and_finish(cluster)
        if model == "by hand":
            compare(cluster, steps, *by_hand(steps), near=1e-10)
        else:
            compare(cluster, steps, *alone(cluster.folder / "alone", steps), near=SINGLE)


@pytest.mark.slow
def test_the_example_trains_in_one_process(tmp_path: Path) -> None:
    """Over several devices it does in `make test-all`: each worker imports transformers."""
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    losses, weights = alone(tmp_path / "alone", 3)
    assert len(set(losses)) == 3
    assert all(map(math.isfinite, losses))
    assert {name.split(".")[0] for name in weights} == {"vision", "language"}


def layouts_of(cluster: Cluster) -> dict[str, Any]:
    """The pipelines of each module, of the plan in force."""
    return {m["module"]: m["pipelines"] for m in cluster.job()["plan"]["strategies"][0]["modules"]}


def said(cluster: Cluster) -> str:
    return str([event["text"] for event in cluster.events()])


def die_and_finish(cluster: Cluster) -> int:
    """A device dies; the job goes on under another plan, and ends. Returns the steps that it made."""
    before = len(cluster.events("recorded"))
    cluster.workers["b/0"].kill()
    until(lambda: len(cluster.events("recorded")) > before, lambda: said(cluster))
    steps = cluster.finish()
    codes = cluster.wait(120)
    assert codes.pop("b/0") == -signal.SIGKILL
    assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
    return steps


def by_hand(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What the model by hand trains to in plain torch."""
    torch.manual_seed(0)
    sampler, data = Sampler(size=len(Captions()), global_batch=BATCH, seed=SEED), Captions()
    batches = [[data[index] for index in sampler.samples(step)] for step in range(steps)]
    return in_one_process(vision_sections(), language_sections(), batches, lr=1e-3, weight_decay=0.1)


def alone(folder: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What the example trains to as `python SCRIPT`, in one process without an agent."""
    folder.mkdir()
    options = json.dumps({"model": "vlm", "out": str(folder), "steps": steps})
    environment = dict(
        os.environ, ELASTICD_DEVICE="cpu", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), OPTIONS=options
    )
    log = folder / "log"
    assert forkserver.start(SCRIPT, environment=environment, output=log).wait(240) == 0, log.read_text()[-3000:]
    losses, weights = ledger_of(folder), weights_of(folder)
    return [line["loss"] for line in losses], {name: value for name, (_, _, value) in weights}


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of all ranks."""
    paths = folder.glob("ledger-*")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def weights_of(folder: Path, *, but: str = "") -> list[tuple[str, Any]]:
    """By name the part that a rank has; of all ranks but one."""
    paths = [path for path in folder.glob("weights-*") if path.name != f"weights-{but}"]
    return [each for path in paths for each in torch.load(path).items()]


def compare(
    cluster: Cluster, steps: int, losses: list[float], weights: Mapping[str, torch.Tensor], *, near: float
) -> None:
    """Losses and weights of the job are those of one process."""
    by_step = {line["step"]: line["loss"] for line in ledger_of(cluster.folder)}
    assert sorted(by_step) == list(range(steps))
    assert [by_step[step] for step in range(steps)] == pytest.approx(losses, abs=near)
    compare_weights(cluster.folder, weights, near=near, but="b:0")


def compare_weights(folder: Path, weights: Mapping[str, torch.Tensor], *, near: float, but: str = "") -> None:
    """The parts of all ranks but one are those of one process."""
    seen: set[str] = set()
    for name, (start, stop, value) in weights_of(folder, but=but):
        expected = weights[name][Box(start=start, stop=stop).slices(Box.whole(weights[name].shape))]
        assert float((value - expected).abs().max()) < near, name
        seen.add(name)
    assert seen == set(weights)
