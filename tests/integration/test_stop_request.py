"""A real job that is stopped after, and during, deaths: it ends within seconds, with a last checkpoint."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from elasticd.checkpoints.folder import scan
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests import sizes
from tests.integration import train
from tests.integration.cluster import Cluster
from tests.integration.test_checkpoints import options
from tests.integration.test_switch import plan_of, stage

SCRIPT = Path(train.__file__)
#: Seconds that a stop takes at most, on a machine that is busy with other things.
MOST_SECONDS = 60.0
#: a/1 stands by from the beginning on.
WITH_STANDBY = {
    "": plan_of(*((1, [stage(0, 3, (device, 1))]) for device in ("a/0", "b/0", "c/0"))),
    "without a/0": plan_of((2, [stage(0, 3, ("b/0", 1))]), (1, [stage(0, 3, ("c/0", 1))])),
    "without a/0 b/0": plan_of((3, [stage(0, 3, ("c/0", 1))])),
}
PAIR = {"": plan_of(*((n, [stage(0, 3, (device, 1))]) for n, device in ((2, "a/0"), (1, "a/1"))))}


def stop(cluster: Cluster) -> None:
    async def ask() -> None:
        cluster.coordinator.commands.stop("job", 600.0, "alice@host")

    cluster.call(ask())


def ends(cluster: Cluster, folder: Path, since: float) -> None:
    """The job is over in time, and its newest checkpoint is of its last step."""
    until(
        lambda: cluster.job()["phase"] == "stopped",
        lambda: f"{cluster.job()['reason']}: {[event['text'] for event in cluster.events()]}",
        seconds=120,
    )
    job = cluster.job()
    assert time.monotonic() - since < MOST_SECONDS
    assert scan(folder)[0].step == job["step"], job["reason"]
    step = job["step"]
    assert f", after {step} steps; the newest checkpoint is of step {step};" in job["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("dies", sizes.beside(["b/0 too"], ["b/0 too", "nobody else"]))
def test_a_stop_ends_after_a_node_with_a_standby_died_and_a_member_dies_meanwhile(
    dies: str, tmp_path: Path
) -> None:
    settings = JobSettings(retry_seconds=0.5)
    with Cluster({"a": 2, "b": 1, "c": 1}, plans=WITH_STANDBY, settings=settings) as cluster:
        cluster.run(SCRIPT, job=options(tmp_path, every=1000))
        cluster.runs(1, steps=5)
        cluster.lose_node("a")
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        began = time.monotonic()
        stop(cluster)
        if dies == "b/0 too":
            cluster.workers["b/0"].kill()
        ends(cluster, tmp_path, began)


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_and_a_stop_on_it_fails_with_the_steps_that_are_lost(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    try:
        with Cluster({"a": 2}, plans=PAIR) as cluster:
            cluster.run(SCRIPT, job=options(folder, every=5, keep=9))
            failed = until(lambda: cluster.events("checkpoint_failed"), lambda: str(cluster.events()))
            assert f"no space left in {folder}" in failed[0]["text"]
            steps = [event["data"]["step"] for event in failed]
            assert cluster.job()["checkpoint"]["failed_step"] >= steps[-1], (
                "of a later one, if it failed meanwhile"
            )
            stop(cluster)
            until(lambda: cluster.job()["phase"] == "stopped", lambda: str(cluster.events()))
            job = cluster.job()
            assert not job["orderly"]
            assert f"no space left in {folder})" in job["reason"].partition("the last checkpoint failed (")[2]
            assert "lost" in job["reason"]
            assert set(cluster.wait().values()) == {1}
    finally:
        subprocess.run(["umount", str(folder)], check=True)
