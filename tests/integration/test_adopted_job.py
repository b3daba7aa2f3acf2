"""etcd is lost under a job that trains, and is set up anew: its workers train on, and a user has it adopted."""

from __future__ import annotations

from pathlib import Path

from elasticd.testing.waiting import until
from tests.integration import train
from tests.integration.cluster import JOB, Cluster
from tests.integration.test_faults import PAIR, SETTINGS, gone_on

SCRIPT = Path(train.__file__)


def test_job_trains_on_over_an_empty_store_and_recovers_once_it_is_adopted() -> None:
    with Cluster({"a": 1, "b": 1}, plans=PAIR, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=3)
        cluster.lose_store()
        until(lambda: f"'elasticd adopt {JOB}'" in cluster.job().get("reason", ""), cluster.events)
        until(lambda: "not heard of" not in cluster.job()["reason"], cluster.job)
        assert cluster.job()["plan"] is None
        assert all(worker.poll() is None for worker in cluster.workers.values())

        cluster.adopt()
        until(lambda: cluster.job()["phase"] == "running", cluster.job)
        assert cluster.job()["plan"]["number"] == 1
        step = cluster.job()["step"]
        until(lambda: cluster.job()["step"] > step, cluster.job)

        cluster.workers["b/0"].kill()
        until(lambda: (cluster.job()["plan"] or {"number": 0})["number"] > 1, cluster.events)
        gone_on(cluster)
