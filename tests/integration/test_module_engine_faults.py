"""The only device that encodes dies, in any phase of a step or in a switch of its module.

The job goes back to the snapshot of what that device held, others encode, and losses and weights are those of
one process.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests import sizes
from tests.integration import train_modules
from tests.integration.cluster import SLOW, Cluster
from tests.integration.test_modules_live import by_hand, compare, said
from tests.integration.test_snapshot_restore import whole_snapshot
from tests.runtime.image_model import pipeline, plan_of, stage

SCRIPT = Path(train_modules.__file__)

LANGUAGE = [pipeline(5, stage(0, 2, ("a/0", 1)), stage(2, 5, ("a/1", 1)))]
#: By the slow or dead device: b/0 encodes alone, then with a/1, and then a/0 does.
PLANS = {
    "": plan_of([pipeline(1, stage(0, 2, ("b/0", 1)))], LANGUAGE, ahead=2),
    "a/1": plan_of([pipeline(1, stage(0, 1, ("b/0", 1)), stage(1, 2, ("a/1", 1)))], LANGUAGE, ahead=2),
    "without b/0": plan_of([pipeline(1, stage(0, 2, ("a/0", 1)))], LANGUAGE),
}
#: Those of `train_modules.die_in`; some are of a switch of vision.
SWITCH = ["preparing", "moving", "acking"]
PHASES = ["forward", "border", "language", "backward", "sums", "vote", "update", *SWITCH]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", sizes.beside(["language"], PHASES))
def test_the_only_encoder_dies_in_a_phase_of_a_step(phase: str) -> None:
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=JobSettings(retry_seconds=0.5)) as cluster:
        job = {"checkpointing": {"snapshot_every": 2}}
        cluster.run(SCRIPT, job=job, **{"b/0": {"die_in": phase}})
        whole_snapshot(cluster, 2)
        (cluster.folder / "die").touch()
        if phase in SWITCH:
            cluster.pace("a/1", SLOW)
        until(lambda: cluster.events("fenced"), lambda: said(cluster))
        until(lambda: cluster.job()["phase"] == "running", lambda: said(cluster))
        (recovered,) = cluster.events("recorded")[1:]
        assert recovered["data"]["step"] % 2 == 0, "nobody else has a copy of the encoder: of a snapshot"
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert codes == {"a/0": 0, "a/1": 0, "b/0": -signal.SIGKILL}, said(cluster)
        compare(cluster, steps, *by_hand(steps), near=1e-10)
