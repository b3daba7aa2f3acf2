"""A move in place over real processes: one that fails midway leaves no whole copy, and older state helps."""

from __future__ import annotations

import signal

import pytest

from elasticd.testing.waiting import until
from tests.integration.cluster import Cluster
from tests.integration.test_snapshot_restore import (
    SCRIPT,
    SETTINGS,
    ended_exactly,
    recorded_from,
    said,
    whole_snapshot,
)
from tests.integration.test_switch import plan_of, stage

#: One pipeline over three nodes: every switch changes what each of them holds.
PLANS = {
    "": plan_of((3, [stage(0, 1, ("a/0", 1)), stage(1, 2, ("b/0", 1)), stage(2, 3, ("c/0", 1))])),
    "a/0": plan_of((3, [stage(0, 1, ("b/0", 1)), stage(1, 2, ("c/0", 1)), stage(2, 3, ("a/0", 1))])),
    "without b/0": plan_of((3, [stage(0, 2, ("a/0", 1)), stage(2, 3, ("c/0", 1))])),
}
NODES = {"a": 1, "b": 1, "c": 1}
#: Bytes that no switch finds enough for two copies of anything.
MEMORY = 1 << 16
#: Bytes of a round: a layer of the model takes several.
ROUND = 60_000


def proposed_in_place(cluster: Cluster) -> list[str]:
    return [event["text"] for event in cluster.events("proposed") if "moves in place" in event["text"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_killed_in_the_midst_of_a_move_in_place_costs_the_steps_since_the_snapshot() -> None:
    with Cluster(NODES, plans=PLANS, settings=SETTINGS, memory=MEMORY) as cluster:
        job = {"checkpointing": {"snapshot_every": 2}}
        options = {"job": job, "round": ROUND, "b/0": {"die_at": "in place"}}
        cluster.run(SCRIPT, **options)
        whole_snapshot(cluster, 4)
        survivors = {device: cluster.workers[device].pid for device in ("a/0", "c/0")}
        cluster.slow("a/0")
        until(lambda: cluster.workers["b/0"].poll() is not None, lambda: said(cluster), seconds=240)
        assert cluster.workers["b/0"].returncode == -signal.SIGKILL, said(cluster)
        assert proposed_in_place(cluster), said(cluster)
        until(lambda: len(cluster.events("recorded")) == 2, lambda: said(cluster), seconds=240)
        back = recorded_from(cluster)
        assert back >= 4
        assert back % 2 == 0, "nobody has a whole copy: all go back to a snapshot"
        steps = cluster.finish()
        codes = cluster.wait(240)
        assert [codes[device] for device in survivors] == [0, 0], said(cluster)
        assert {device: cluster.workers[device].pid for device in survivors} == survivors
        ended_exactly(cluster, back, steps)


# The one above begins such a move in a job; tests/runtime/test_move.py has moves that end, exactly.
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_state_that_does_not_fit_twice_moves_in_place_and_training_stays_exact() -> None:
    with Cluster(NODES, plans=PLANS, settings=SETTINGS, memory=MEMORY) as cluster:
        cluster.run(SCRIPT, job={"checkpointing": {"snapshot_every": 2}}, round=ROUND)
        whole_snapshot(cluster, 4)
        cluster.slow("a/0")
        until(lambda: len(cluster.events("recorded")) == 2, lambda: said(cluster), seconds=240)
        assert proposed_in_place(cluster), said(cluster)
        back = recorded_from(cluster)
        steps = cluster.finish()
        assert set(cluster.wait(240).values()) == {0}, said(cluster)
        ended_exactly(cluster, back, steps)
