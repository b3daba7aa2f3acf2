"""The last copies die: the job goes back to a snapshot in memory or to a checkpoint, and trains on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests import sizes
from tests.integration import train
from tests.integration.cluster import Cluster
from tests.integration.test_switch import ledger, plan_of, stage, worst_difference

SCRIPT = Path(train.__file__)
SETTINGS = JobSettings(retry_seconds=0.5)
#: One pipeline over two nodes: whoever dies had boxes that nobody else has.
PLANS = {
    "": plan_of((3, [stage(0, 2, ("a/0", 1)), stage(2, 3, ("b/0", 1))])),
    "without b/0": plan_of((3, [stage(0, 3, ("a/0", 1))])),
}


def said(cluster: Cluster) -> str:
    return "\n".join(
        [event["text"] for event in cluster.events()] + [cluster.log(d)[-2000:] for d in cluster.workers]
    )


def ended_exactly(cluster: Cluster, back: int, steps: int) -> None:
    """All numbers are those of one process; the surviving history has each step from `back` on once."""
    lines = ledger(cluster)
    newest = [line["step"] for line in lines if line["plan"] == lines[-1]["plan"]]
    assert newest == list(range(back, steps))
    assert worst_difference(cluster, steps) < 1e-10


def recorded_from(cluster: Cluster) -> int:
    """The step at which the newest plan was recorded."""
    return int(cluster.events("recorded")[-1]["data"]["step"])


def whole_snapshot(cluster: Cluster, least: int) -> None:
    until(lambda: (cluster.job().get("snapshot") or 0) >= least, lambda: said(cluster))


@pytest.mark.slow
def test_survivors_go_back_to_the_dead_ones_snapshot() -> None:
    with Cluster({"a": 1, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, job={"checkpointing": {"snapshot_every": 2}})
        whole_snapshot(cluster, 4)
        survivor = cluster.workers["a/0"].pid
        cluster.workers["b/0"].kill()
        until(lambda: len(cluster.events("recorded")) == 2, lambda: said(cluster))
        back = recorded_from(cluster)
        assert back >= 4
        assert back % 2 == 0
        steps = cluster.finish()
        codes = cluster.wait(120)
        assert codes["a/0"] == 0, said(cluster)
        assert cluster.workers["a/0"].pid == survivor
        ended_exactly(cluster, back, steps)


@pytest.mark.slow
def test_survivors_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    with Cluster({"a": 1, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        checkpointing = {"folder": str(tmp_path / "kept"), "every": 3}
        cluster.run(SCRIPT, job={"checkpointing": checkpointing})
        until(lambda: len(cluster.events("checkpoint")) >= 2, lambda: said(cluster))
        cluster.workers["b/0"].kill()
        until(lambda: len(cluster.events("recorded")) == 2, lambda: said(cluster))
        back = recorded_from(cluster)
        assert back >= 3
        assert back % 3 == 0
        steps = cluster.finish()
        assert cluster.wait(120)["a/0"] == 0, said(cluster)
        ended_exactly(cluster, back, steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "apart",
    sizes.beside([True], [False, True]),
    ids=lambda apart: "one-after-the-other" if apart else "at-once",
)
def test_a_job_whose_workers_all_die_waits_and_goes_on_from_its_snapshot_when_they_come_again(
    *, apart: bool
) -> None:
    options: dict[str, Any] = {"job": {"checkpointing": {"snapshot_every": 2}}}
    with Cluster({"a": 1, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, **options)
        whole_snapshot(cluster, 4)
        cluster.workers["a/0"].kill()
        if apart:  # the job waits for capacity already, as there is no plan for what is left
            until(lambda: "no plan for" in cluster.job()["reason"], lambda: said(cluster))
        cluster.workers["b/0"].kill()
        until(lambda: "no worker is left" in cluster.job()["reason"], lambda: said(cluster))
        assert "the state is safe in snapshots of step" in cluster.job()["reason"]
        again(cluster, options)
        until(lambda: len(cluster.events("recorded")) == 2, lambda: said(cluster))
        back = recorded_from(cluster)
        steps = cluster.finish()
        assert set(cluster.wait(120).values()) == {0}, said(cluster)
        ended_exactly(cluster, back, steps)


@pytest.mark.slow
def test_without_any_older_state_the_job_stops_and_names_what_is_lost() -> None:
    with Cluster({"a": 1, "b": 1}, plans=PLANS, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT)
        cluster.runs(1, steps=5)
        cluster.workers["b/0"].kill()
        until(lambda: cluster.events("stopped"), lambda: said(cluster))
        assert "state is lost: " in cluster.job()["reason"]
        assert "no snapshot or checkpoint to go back to" in cluster.job()["reason"]
        assert cluster.wait(60)["a/0"] == 1


def again(cluster: Cluster, options: dict[str, Any]) -> None:
    """What torchruns do whose workers died: they ask to take part once more, and start new ones."""
    for node in sorted(cluster.nodes):
        cluster.rejoin(node)
    for node in sorted(cluster.nodes):
        cluster.start_worker(f"{node}/0", SCRIPT, options)
