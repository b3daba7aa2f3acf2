"""Jobs of `elasticd.live` on four real processes: deaths, joins, drains; compared with one process of torch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.integration import train_live
from tests.integration.cluster import Cluster
from tests.integration.train_live import BATCH, SEED, reference

SCRIPT = Path(train_live.__file__)
SETTINGS = JobSettings(retry_seconds=0.5)
NODES = {"a": 2, "b": 2}


def entries(cluster: Cluster) -> dict[str, list[list[Any]]]:
    """By process the steps that it made: index, loss, its samples, number of the plan, time."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in cluster.folder.glob("ledger-*")
    }


def check(cluster: Cluster, kind: str, steps: int) -> None:
    """Losses, weights and second moments are those of one process, and each step has its samples once."""
    losses, weights, moments = reference(steps, kind)
    made = entries(cluster)
    known: set[int] = set()
    for name, rows in made.items():
        for step, loss, *_ in rows:
            if loss == loss:
                known.add(step)
                assert loss == pytest.approx(losses[step], abs=1e-13), (name, step)
    assert known == set(range(steps))
    outs = sorted(cluster.folder.glob("weights-*"))
    assert outs
    for path in outs:
        own, second = torch.load(path)
        for parameter, expected in weights.items():
            torch.testing.assert_close(own[parameter], expected, atol=1e-11, rtol=0)
            torch.testing.assert_close(second[parameter], moments[parameter], atol=1e-11, rtol=0)
    sampler = Sampler(size=100, global_batch=BATCH, seed=SEED)
    for step in range(steps):
        newest = max((row[3] for rows in made.values() for row in rows if row[0] == step), default=0)
        shares = {tuple(r[2]) for rows in made.values() for r in rows if r[0] == step and r[3] == newest}
        assert sorted(i for share in shares for i in share) == sorted(sampler.samples(step)), step


def codes_of(cluster: Cluster, victim: str) -> None:
    codes = cluster.wait(120)
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["ddp", "fsdp", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("hsdp", "tp"))]
)
def test_a_kill_in_the_backward_pass_loses_one_device_alone(kind: str) -> None:
    """Without replicas the state comes from snapshots, and steps since the last one are made again."""
    steps = 14
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, dies={"b/1": ["backward", 6]})
        codes_of(cluster, "b/1")
        check(cluster, kind, steps)
        (recovered,) = (e for e in cluster.events("recorded") if e["data"]["number"] > 1)
        assert len(cluster.events("fenced")) == 1
        newest = (4, 5, 6) if kind in ("fsdp", "tp") else (6,)  # a snapshot may still be on its way
        assert recovered["data"]["step"] in newest


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("ddp", "unheard"),
        full("ddp", "forward"),
        full("ddp", "vote"),
        full("hsdp", "vote"),
        full("hsdp", "after the vote"),
        full("fsdp", "unheard"),
        full("ddp", "update"),
    ],
)
def test_a_step_counts_on_all_ranks_or_on_none_wherever_one_is_lost(kind: str, moment: str) -> None:
    """A rank that did not hear a decided vote makes the update all the same. An all-reduce for a log after the
    update does not break the body off."""
    steps = 10
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, dies={"b/1": [moment, 5]}, logs=True)
        if moment == "unheard":
            assert set(cluster.wait(120).values()) == {0}
        else:
            codes_of(cluster, "b/1")
        check(cluster, kind, steps)
        assert len(cluster.events("fenced")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["swap", *map(full, ("build", "move", "moved", "ok"))])
def test_a_second_death_at_any_point_of_a_recovery_is_recovered_from(moment: str) -> None:
    """The two that die hold the same part of the state, which snapshots have."""
    steps = 10
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(
            SCRIPT, kind="hsdp", steps=steps, dies={"b/1": ["backward", 5], "a/1": [moment, 2]}, seconds=0.01
        )
        codes = cluster.wait(120)
        assert codes == {"a/0": 0, "b/0": 0, "a/1": -signal.SIGKILL, "b/1": -signal.SIGKILL}
        check(cluster, "hsdp", steps)


@pytest.mark.full  # a busy machine hides a device that is three times slower
@pytest.mark.slow
def test_a_slow_device_gets_fewer_samples_and_its_share_back_in_the_same_groups() -> None:
    """A plan of the same mesh moves nothing, and calls no `build`."""
    steps = 100
    with Cluster(NODES, settings=SETTINGS, forward=2e-3) as cluster:
        cluster.run(SCRIPT, kind="fsdp", steps=steps)
        cluster.runs(1, 4)
        cluster.pace("a/0", 3.0)
        until(lambda: len(cluster.events("recorded")) >= 2, cluster.events)
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check(cluster, "fsdp", steps)
        made = entries(cluster)
        last = {name: len(rows[-1][2]) for name, rows in made.items()}
        slow = next(count for name, count in last.items() if name.startswith("ledger-a-0"))
        assert slow <= 3, last
        assert not cluster.events("fenced")
        pauses = [event["data"]["pause_seconds"] for event in cluster.events("swapped")][4:]
        assert pauses, "it was switched"


@pytest.mark.slow
def test_a_device_dies_another_comes_and_one_is_drained() -> None:
    steps, nodes = 70, {"a": 1, "b": 1, "c": 1, "d": 1}
    with Cluster(nodes, settings=SETTINGS, emulated=False) as cluster:
        options = {
            "kind": "hsdp",
            "steps": steps,
            "seconds": 0.04,
        }  # of a sample: a fourth device saves a quarter
        cluster.run(SCRIPT, **options)
        cluster.runs(1, 4)
        dead = cluster.workers.pop("d/0")
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        until(lambda: len(cluster.events("recorded")) == 2, cluster.events)
        cluster.rejoin("d")
        cluster.start_worker("d/0", SCRIPT, options)
        until(lambda: len(cluster.events("recorded")) == 3, cluster.events)
        os.kill(cluster.workers["b/0"].pid, signal.SIGTERM)
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check(cluster, "hsdp", steps)
        joined = entries(cluster)[f"ledger-d-0-{cluster.workers['d/0'].pid}"]
        assert joined, "it took part"
        assert len(cluster.events("fenced")) == 1, "neither the join nor the drain was a fault"
