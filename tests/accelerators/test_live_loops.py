"""Loops of `elasticd.live` on an emulated device, whose process groups fail as NCCL's do: aborted, with garbage
and no error. Losses and weights are those of one process on the CPU."""

from __future__ import annotations

import pytest

from tests.accelerators import vgpu
from tests.integration.cluster import Cluster
from tests.integration.test_live import NODES, SCRIPT, SETTINGS, check, codes_of, full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("fsdp", "kept"),
        full("ddp", "backward"),
        full("ddp", "log"),
        full("hsdp", "vote"),
        full("hsdp", "update"),
        full("tp", "forward"),
    ],
)
def test_a_death_on_the_device_costs_no_step(kind: str, moment: str) -> None:
    vgpu.needed()
    steps, options = 10, {"vgpu": True, "seconds": 0.01, "logs": "loss" if moment == "log" else ""}
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, dies={"b/1": [moment, 5]}, **options)
        codes_of(cluster, "b/1")
        assert all(member["computes_on"]["name"].startswith("vgpu") for member in cluster.job()["members"])
        check(cluster, kind, steps)
        assert len(cluster.events("fenced")) == 1


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_drain_on_the_device_is_no_fault(kind: str) -> None:
    vgpu.needed()
    steps = 20
    with Cluster(NODES, settings=SETTINGS, emulated=False) as cluster:
        cluster.run(SCRIPT, kind=kind, steps=steps, vgpu=True, drains={"b/1": 5}, seconds=0.01)
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check(cluster, kind, steps)
        assert not cluster.events("fenced")
