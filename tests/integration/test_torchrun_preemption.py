"""SIGTERM as spot nodes and schedulers send it, to a worker and to a torchrun: real torchruns, a real etcd."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elasticd.testing.waiting import until
from tests.etcds import SharedEtcd
from tests.integration import train
from tests.integration.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FOREVER = 1_000_000
NODES = ("a", "b", "c")


@pytest.fixture(scope="module")
def job(shared_etcd: SharedEtcd) -> Iterator[Fleet]:
    """A job on three nodes of one device, started by `elasticd run`: three replicas, of which two leave."""
    with (
        tempfile.TemporaryDirectory(prefix="ed-") as name,
        Fleet(shared_etcd, Path(name), forward=1.7e-3) as fleet,
    ):
        fleet.coordinator("c0")
        for node in NODES:
            fleet.agent(node, 1)
        for node in NODES:
            fleet.run(node, 1, str(len(NODES)), FOREVER, micro_batch=train.BATCH // len(NODES))
        until(lambda: len(binding(fleet)) == len(NODES), fleet.said, seconds=300)
        fleet.advanced(4)
        yield fleet


def binding(fleet: Fleet) -> dict[str, str]:
    plan = fleet.job().get("plan")
    return dict(plan["binding"]) if plan else {}


def kinds(fleet: Fleet) -> list[str]:
    return [event.kind for event in fleet.events()]


def worker(fleet: Fleet, device: str) -> psutil.Process:
    """The newest process that was given steps on a device."""
    found = [path for path in fleet.folder.glob(f"ledger-{device.replace('/', ':')}-*") if path.stat().st_size]
    newest = max(found, key=lambda path: path.stat().st_mtime)
    return psutil.Process(int(newest.name.rpartition("-")[2]))


def goes_on_exactly(fleet: Fleet, *devices: str) -> None:
    """Those that are left train on; nobody was fenced off, and nobody joined again."""
    until(lambda: {*binding(fleet)} == {*devices}, fleet.said)
    fleet.advanced(4)
    assert not {"fenced", "joined"} & {*kinds(fleet)}, fleet.said()
    each_step_once_with_the_loss_of_one_process(fleet)


def each_step_once_with_the_loss_of_one_process(fleet: Fleet) -> None:
    """Nothing was lost, so that nobody was given a step twice."""
    known: dict[int, float] = {}
    for name, ledger in fleet.ledgers().items():
        steps = [step.step for step in ledger]
        assert steps == sorted(set(steps)), name
        for step in ledger:
            assert known.setdefault(step.step, step.loss) == step.loss, "all ranks are given the same"
    count = min(len(known), 40)
    losses, _ = train.reference(count)
    assert [known[step] for step in range(count)] == pytest.approx(losses, abs=1e-9)


def test_a_worker_that_is_told_to_go_is_not_started_again_and_nobody_is_lost(job: Fleet) -> None:
    told = worker(job, "c/0")
    told.send_signal(signal.SIGTERM)
    assert job.processes["run-c"].wait(300) == 0, "its torchrun ends with it, in good order"
    assert not told.is_running()
    goes_on_exactly(job, "a/0", "b/0")


def test_a_node_that_is_told_to_go_leaves_and_the_others_go_on(job: Fleet) -> None:
    """As a container's end: every process on the node is told, and then told again by the one above it."""
    stay = binding(job).keys() - {"b/0"}
    tree = job.tree("run-b")
    for process in reversed(tree):
        process.send_signal(signal.SIGTERM)
    until(lambda: "SIGTERM: b/0 leaves the job" in job.log("run-b"), job.said)
    for process in tree:  # while torchrun waits for its worker
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    assert job.processes["run-b"].wait(300) == 128 + signal.SIGTERM
    goes_on_exactly(job, *stay)
    assert not any(noise in job.log("run-b") for noise in ("Unable to shutdown", "Traceback", "failed (exit"))
