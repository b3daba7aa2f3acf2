"""A job that keeps no state twice, and saves none, outlives a node that stands still for seconds, as a virtual
machine does that moves to another host. Real processes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from elasticd.testing.waiting import until
from tests import sizes
from tests.etcds import SharedEtcd
from tests.integration import train
from tests.integration.fleet import Fleet, exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Bytes of a device that cannot hold the whole model with its optimizer's state: two make one pipeline.
MEMORY = 900_000
#: Seconds that a node is silent: longer than its lease, and than the leader waits for a node that others can
#: do without.
SILENT = 5.0
STEPS = 60


@pytest.mark.parametrize(
    "node", sizes.beside(["a"], ["a", "b"])
)  # a's worker is rank 0, whose reports tell that steps are made
def test_a_node_that_alone_holds_some_state_is_waited_for(shared_etcd: SharedEtcd, node: str) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="ed-") as name,
        Fleet(shared_etcd, Path(name), memory=MEMORY) as fleet,
    ):
        fleet.coordinator("c0")
        for each in ("a", "b"):
            fleet.agent(each, 1)
        for each in ("a", "b"):
            fleet.run(each, 1, "2", STEPS, micro_batch=train.BATCH // 2)
        fleet.advanced(10)
        plan = fleet.shown()["plan"]
        assert plan["reason"].startswith("1 pipeline:"), plan
        assert "idle" not in plan["reason"], plan
        still = [process for part in (node, f"run-{node}") for process in fleet.tree(part)]
        for process in still:
            process.suspend()
        time.sleep(SILENT)  # the time itself is what is tested
        for process in still:
            process.resume()
        until(lambda: fleet.shown()["phase"] in ("done", "stopped"), fleet.said)
        assert fleet.shown()["phase"] == "done", fleet.said()
        assert "fenced" not in [event.kind for event in fleet.events()], fleet.said()
        exact(fleet, 1, train.CONFIG)
