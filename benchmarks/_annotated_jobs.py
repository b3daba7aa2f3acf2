"""Jobs of real processes whose plans are annotations: parity, a switch, a rank that is killed, and slices whose
holders are gone."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from _results import Row, row

from elasticd.testing.waiting import until

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.cluster import SLOW, Cluster
from tests.integration.test_given_plan import CONFIG, SCRIPT, SETTINGS, A, B, annotated
from tests.integration.test_switch import worst_difference

#: Largest difference from one process, of losses and weights in float64.
MOST = 1e-10
#: Devices of each node.
NODES = {"a": 4, "b": 3}
#: What has a job's state twice, and what can be gone back to, by what a slice without an owner then comes from.
SOURCES: dict[str, dict[str, Any]] = {
    "a replica": {"parallelism": {"zero": 1, "replicas": 2}},
    "a snapshot": {"checkpointing": {"snapshot_every": 2}},
    "a checkpoint": {"checkpointing": {"every": 3}},
}


def job_rows(only_given: bool = False) -> Iterator[Row]:
    """HSPMD's unlike pipelines on seven ranks. only_given: but for those that switch or lose state."""
    title = "7 ranks, [TP2 x 5, TP2 x 3] beside [TP2 x 6, TP1 x 2] as annotations"
    whole, killed = given()
    yield _exact(f"{title}: furthest from one process", whole)
    yield _exact(f"{title}, then one rank killed: furthest from one process", killed)
    if only_given:
        return
    name = "7 ranks, the first of these to the second, in place: furthest from one process"
    yield _exact(name, switched())
    found = [what for what, job in SOURCES.items() if _from(what, job)]
    refused = _refused()
    title = "a slice whose holder is gone comes from a replica, a snapshot, a checkpoint, or is refused by name"
    count = len(found) + refused
    yield row(title, count, f"of {len(SOURCES) + 1}", goal=f"{len(SOURCES) + 1}", met=count == len(SOURCES) + 1)


def _exact(title: str, apart: float) -> Row:
    return row(title, apart, "", goal=f"<= {MOST:g}", met=apart <= MOST)


def given() -> tuple[float, float]:
    """A job that keeps the plan to its end, and one of which a rank is killed."""
    plan = {"plan": msgspec.to_builtins(annotated((1, A), (2, B))), "keep_plan": True}
    with Cluster(NODES, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, layers=CONFIG.layers, steps=12, job={"parallelism": plan})
        whole = _ended(cluster, 12)
        assert len(cluster.job()["plan"]["binding"]) == sum(NODES.values())
    with Cluster(NODES, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, layers=CONFIG.layers, job={"parallelism": plan})
        cluster.runs(1, steps=5)
        _kill(cluster, "b/2")
        until(lambda: len(cluster.events("recorded")) == 2, lambda: str(cluster.events()))
        return whole, _ended(cluster, cluster.finish(), without="b/2")


def switched() -> float:
    """From one annotated plan to the other, which is on other ranks."""
    plans = {"": annotated((3, A)), "a/1": annotated((3, B))}
    with Cluster(NODES, plans=plans, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, layers=CONFIG.layers)
        cluster.runs(1, steps=12)
        cluster.pace("a/1", SLOW)
        cluster.runs(2, steps=3)
        return _ended(cluster, cluster.finish())


def _ended(cluster: Cluster, steps: int, without: str = "") -> float:
    codes = cluster.wait(180)
    codes.pop(without, None)
    assert set(codes.values()) == {0}, {device: cluster.log(device)[-2000:] for device in codes}
    return worst_difference(cluster, steps, CONFIG)


def _kill(cluster: Cluster, device: str) -> None:
    cluster.workers[device].kill()


def _from(what: str, job: Mapping[str, Any]) -> bool:
    """Whether a job goes on, exactly, from the state that it has kept there, once a rank with slices of its own
    is killed."""
    folder = Path(tempfile.mkdtemp())
    try:
        options = {group: dict(fields) for group, fields in job.items()}
        if "every" in options.get("checkpointing", {}):
            options["checkpointing"]["folder"] = str(folder / "kept")
        options.setdefault("parallelism", {})["plan"] = msgspec.to_builtins(annotated((3, B)))
        with Cluster(NODES, settings=SETTINGS) as cluster:
            cluster.run(SCRIPT, layers=CONFIG.layers, job=options)
            cluster.runs(1, steps=5)
            if what == "a snapshot":
                until(lambda: (cluster.job().get("snapshot") or 0) >= 4, lambda: str(cluster.events()))
            if what == "a checkpoint":
                until(lambda: len(cluster.events("checkpoint")) >= 2, lambda: str(cluster.events()))
            _kill(cluster, "b/2")
            until(lambda: cluster.events("fenced"), lambda: str(cluster.events()))
            fenced = cluster.job()["plan"]["number"]
            until(lambda: cluster.job()["plan"]["number"] > fenced, lambda: str(cluster.events()))
            apart = _ended(cluster, cluster.finish(), without="b/2")
            words = " ".join(event["text"] for event in cluster.events("proposed"))
            assert what == "a replica" or what.removeprefix("a ") in words, words
            return apart <= MOST
    finally:
        shutil.rmtree(folder)


def _refused() -> bool:
    """Whether a job that has kept no state ends, and names the slices that are lost."""
    plan = {"plan": msgspec.to_builtins(annotated((3, B))), "keep_plan": True}
    with Cluster(NODES, settings=SETTINGS) as cluster:
        cluster.run(SCRIPT, layers=CONFIG.layers, job={"parallelism": plan})
        cluster.runs(1, steps=5)
        _kill(cluster, "b/2")
        until(lambda: cluster.events("stopped"), lambda: str(cluster.events()))
        reason = str(cluster.job()["reason"])
        return "state is lost: " in reason and "no snapshot or checkpoint to go back to" in reason
