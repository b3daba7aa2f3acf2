"""Workers that are told to go (SIGTERM) in a real job: what they hold moves off first, and nothing is lost."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path

import pytest

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests import sizes
from tests.integration import train
from tests.integration.cluster import Cluster
from tests.integration.test_faults import PLANS
from tests.integration.test_switch import check_exactness, plan_of, stage

SCRIPT = Path(train.__file__)
SETTINGS = JobSettings(retry_seconds=0.5)
#: b/0 alone holds the last layers and the head.
STAGES = {
    "": plan_of((3, [stage(0, 2, ("a/0", 1), ("a/1", 1)), stage(2, 3, ("b/0", 1))])),
    "without b/0": plan_of((3, [stage(0, 2, ("a/0", 1)), stage(2, 3, ("a/1", 1))])),
}


def texts(cluster: Cluster) -> str:
    return str([event["text"] for event in cluster.events()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("holder", "zero"), sizes.beside([("stage", 1)], product(("replica", "stage"), (0, 1)))
)
def test_one_that_is_told_to_go_leaves_and_nothing_is_lost_or_done_twice(holder: str, zero: int) -> None:
    """One of two replicas, or the only holder of a stage."""
    plans = PLANS if holder == "replica" else STAGES
    with Cluster({"a": 2, "b": 1}, plans=plans, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, job={"parallelism": {"zero": zero}})
        cluster.runs(1, steps=5)
        pids = {device: worker.pid for device, worker in cluster.workers.items()}
        cluster.workers["b/0"].send_signal(signal.SIGTERM)
        assert cluster.workers["b/0"].wait(180) == 0, cluster.log("b/0")[-3000:]
        until(lambda: cluster.events("worker_lost"), lambda: texts(cluster))
        (lost,) = cluster.events("worker_lost")
        assert lost["data"]["clean"]
        assert "it has drained, and the job goes on without it" in lost["text"]
        assert {m["pid"] for m in cluster.job()["members"]} == {pids["a/0"], pids["a/1"]}
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        assert not cluster.events("fenced"), "nobody was lost"
        check_exactness(cluster, steps, plans=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", sizes.beside(["elasticd stop"], ["elasticd stop", "SIGTERM"]))
def test_all_that_are_told_to_go_end_the_job_which_says_so(how: str) -> None:
    """Each by itself, or by a user who stops the job."""

    async def stop() -> None:
        cluster.coordinator.commands.stop("job", 60.0, "alice@host")

    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=5)
        if how == "SIGTERM":
            for worker in cluster.workers.values():
                worker.send_signal(signal.SIGTERM)
        else:
            cluster.call(stop())
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}
        why = "all workers drain (SIGTERM)" if how == "SIGTERM" else "stopped by alice@host"
        until(lambda: cluster.job()["phase"] == "stopped", lambda: texts(cluster))
        assert f"{why}, after " in cluster.job()["reason"]


@pytest.mark.slow
def test_one_that_cannot_wait_is_a_loss_like_any_other() -> None:
    """It is in the midst of a step that the grace does not last for: the others go on without it."""
    with Cluster({"a": 2, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, **{"b/0": {"job": {"grace": 0.0}}})
        cluster.runs(1, steps=5)
        cluster.workers["b/0"].send_signal(signal.SIGTERM)
        until(lambda: len(cluster.events("recorded")) == 2, lambda: texts(cluster))
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-3000:] for device in codes}
        assert cluster.events("fenced")[-1]["data"]["gone"] == ["b/0"]
        check_exactness(cluster, steps, plans=2)
