"""Whole jobs whose workers compute on vgpu: a switch, a death, snapshots and checkpoints, exact to the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elasticd.checkpoints.folder import scan, sound
from elasticd.testing.waiting import until
from tests.accelerators import vgpu
from tests.integration import test_switch_in_place, train
from tests.integration.cluster import SLOW, Cluster
from tests.integration.test_faults import PLANS, SETTINGS
from tests.integration.test_switch import check_exactness
from tests.integration.test_switch_in_place import MEMORY


@pytest.mark.slow
def test_a_job_on_the_device_switches_and_survives_a_death_exactly(tmp_path: Path) -> None:
    vgpu.needed()
    job = {
        "parallelism": {"device": "vgpu"},
        "checkpointing": {"folder": str(tmp_path), "every": 5, "snapshot_every": 3},
    }
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(Path(train.__file__), vgpu=True, job=job)
        cluster.runs(1, steps=8)
        members = cluster.job()["members"]
        assert [member["computes_on"]["name"] for member in members] == ["vgpu:0", "vgpu:1", "vgpu:0"]
        cluster.slow("a/1")
        cluster.runs(2, steps=3)
        until(lambda: cluster.job()["snapshot"] is not None, lambda: str(cluster.job()))
        cluster.workers["b/0"].kill()
        until(lambda: len(cluster.events("recorded")) == 3, lambda: str(cluster.events()))
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert codes.pop("b/0") == -signal.SIGKILL
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        check_exactness(cluster, steps, plans=3)
        assert sound(scan(tmp_path)), "a checkpoint of values of the device is whole"


@pytest.mark.slow
@pytest.mark.full
def test_an_old_copy_that_does_not_fit_beside_the_new_one_waits_in_host_memory() -> None:
    """No snapshot is made: in place this switch would not be allowed."""
    vgpu.needed()
    with Cluster(
        test_switch_in_place.NODES, plans=test_switch_in_place.PLANS, settings=SETTINGS, memory=MEMORY
    ) as cluster:
        cluster.run(Path(train.__file__), vgpu=True, job={"parallelism": {"device": "vgpu"}})
        cluster.runs(1, steps=4)
        cluster.pace("a/0", SLOW)
        cluster.runs(2, steps=3)
        steps = cluster.finish()
        assert set(cluster.wait(120).values()) == {0}, {d: cluster.log(d)[-3000:] for d in cluster.workers}
        told = [event["text"] for event in cluster.events("proposed")]
        assert "for the old copy and the new: what changes" in told[-1]
        assert told[-1].endswith("what changes of the old copy goes to the host's memory meanwhile")
        check_exactness(cluster, steps, plans=2)
