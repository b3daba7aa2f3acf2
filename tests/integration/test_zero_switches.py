"""A job whose optimizer state is kept by some switches policies and layouts in place, and stays exact."""

from __future__ import annotations

from typing import Any

import pytest
from elasticd_planner.spec.plan import StatePolicy

from elasticd.testing.waiting import until
from tests.integration.cluster import SLOW, Cluster
from tests.integration.test_switch import SCRIPT, SETTINGS, check_exactness, plan_of, stage

PLANS = {
    # two unlike pipelines on all five devices; each has replicas of the other's state
    "": plan_of(
        (2, [stage(0, 2, ("a/0", 1), ("a/1", 1)), stage(2, 3, ("a/2", 1))]),
        (1, [stage(0, 3, ("b/0", 1), ("b/1", 1))]),
    ).replace(state=StatePolicy(zero=1, replicas=2)),
    # one pipeline on one node; those of the other only carry replicas
    "a/1": plan_of(
        (3, [stage(0, 1, ("a/0", 3), ("a/1", 1)), stage(1, 3, ("a/2", 1))]), idle=("b/0", "b/1")
    ).replace(state=StatePolicy(zero=2, replicas=2)),
    # the carriers compute again, nothing is replicated, the other policy
    "a/0": plan_of(
        (2, [stage(0, 3, ("a/0", 3), ("a/1", 3), ("a/2", 2))]),
        (1, [stage(0, 1, ("b/0", 1)), stage(1, 3, ("b/1", 1))]),
    ),
}


def with_carriers(cluster: Cluster) -> dict[str, Any]:
    """The plan in force, once it is one in which devices only carry state; another may come soon after it."""
    plan = cluster.job()["plan"]
    return dict(plan) if plan["carriers"] else {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_state_policies_switch_in_place_and_training_stays_that_of_one_process() -> None:
    with Cluster({"a": 3, "b": 2}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, job={"parallelism": {"zero": 1, "replicas": 2}})
        cluster.runs(1, steps=12, seconds=150)
        assert cluster.job()["plan"]["state"] == {"zero": 1, "replicas": 2}
        cluster.slow("a/1")
        carried = until(lambda: with_carriers(cluster), lambda: [e["text"] for e in cluster.events()])
        assert carried["carriers"] == ("b/0", "b/1")
        assert set(carried["binding"]) == {"a/0", "a/1", "a/2", "b/0", "b/1"}
        cluster.runs(carried["number"], steps=3, seconds=90)
        cluster.pace("a/0", SLOW)
        cluster.pace("a/1", 1.0)
        until(lambda: cluster.job()["plan"]["carriers"] == (), lambda: [e["text"] for e in cluster.events()])
        steps = cluster.finish()
        codes = cluster.wait(300)
        assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
        check_exactness(cluster, steps)
        swapped = cluster.events("swapped")
        for number in {event["data"]["number"] for event in swapped} - {1}:
            data = [event["data"] for event in swapped if event["data"]["number"] == number]
            sent, lacking = (sum(d[key] for d in data) for key in ("bytes_sent", "bytes_lacking"))
            assert 0 < lacking < sent < 1.02 * lacking, "state counts too, and goes once"
