"""Jobs of `elasticd.live` on four real processes: deaths, joins, drains; compared with one process of torch."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler

from elasticd.machines.job.state.job_state import JobSettings
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
        assert recovered["data"]["step"] == 6 or kind in ("fsdp", "tp")
