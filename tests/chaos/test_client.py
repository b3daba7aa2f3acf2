"""The verbs at a real cluster: signals reach the worker that is meant, a cut agent is away and comes back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from elasticd_planner.value import Invalid

from elasticd.chaos.client import Chaos
from elasticd.cli.app import elasticd
from elasticd.client import ApiClient, CannotReach
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.store.memory import MemoryStore
from elasticd.testing.waiting import until
from tests.integration import train
from tests.integration.cluster import Cluster
from tests.integration.test_switch import plan_of, stage

SCRIPT = Path(train.__file__)
#: Two replicas: either of them may be lost.
PLANS = {
    "": plan_of((2, [stage(0, 3, ("a/0", 1))]), (1, [stage(0, 3, ("b/0", 1))])),
    "without b/0": plan_of((3, [stage(0, 3, ("a/0", 1))])),
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    patient = JobSettings(node_seconds=3.0)  # a step that a busy machine holds up is no fault
    with Cluster({"a": 1, "b": 1}, plans=PLANS, settings=patient) as made:
        made.run(SCRIPT, steps=2000)
        made.runs(1, steps=2)
        yield made


def status(cluster: Cluster, device: str) -> str:
    return str(psutil.Process(cluster.workers[device].pid).status())


def connected(cluster: Cluster, node: str) -> bool:
    async def look() -> bool:
        return cluster.coordinator.leading.state.nodes[node].connected

    return cluster.call(look())


@pytest.mark.slow
def test_signals_reach_the_worker_that_is_meant(cluster: Cluster) -> None:
    with ApiClient(cluster.coordinator.url) as api:
        chaos = Chaos(api)
        chaos.freeze("b/0")
        until(lambda: status(cluster, "b/0") == psutil.STATUS_STOPPED)
        assert status(cluster, "a/0") != psutil.STATUS_STOPPED
        chaos.thaw("b/0")
        until(lambda: status(cluster, "b/0") != psutil.STATUS_STOPPED)
        chaos.kill("b/0")
        assert cluster.workers["b/0"].wait(60) == -signal.SIGKILL
        until(lambda: cluster.events("fenced"))
        assert cluster.workers["a/0"].poll() is None
    assert [event["data"]["how"] for event in cluster.events("chaos")] == ["freeze", "thaw", "kill"]


@pytest.mark.slow
def test_who_is_frozen_is_thawed_by_an_agent_that_ends(cluster: Cluster) -> None:
    with ApiClient(cluster.coordinator.url) as api:
        Chaos(api).freeze("b/0")
    until(lambda: status(cluster, "b/0") == psutil.STATUS_STOPPED)
    cluster.restart_agent("b")
    until(lambda: status(cluster, "b/0") != psutil.STATUS_STOPPED)


@pytest.mark.slow
def test_a_cut_agent_is_away_until_it_is_healed_and_its_worker_trains_on(cluster: Cluster) -> None:
    url = cluster.coordinator.url
    done = CliRunner().invoke(elasticd, ["chaos", "cut", "b", "--coordinator", url])
    assert done.exit_code == 0, done.output
    until(lambda: not connected(cluster, "b"))
    before = cluster.job()["step"]
    until(lambda: (cluster.job()["step"] or 0) > before + 3)
    key = cluster.coordinator.keys.node("b")
    until(lambda: MemoryStore(cluster.server).get(key) is None)
    with ApiClient(url) as api:
        with pytest.raises(CannotReach, match="is cut already"):
            Chaos(api).cut("b")
        with pytest.raises(CannotReach, match="cannot be reached"):
            Chaos(api).kill("b/0")
        Chaos(api).heal("b")
        until(lambda: connected(cluster, "b"))
        with pytest.raises(CannotReach, match="nothing to heal"):
            Chaos(api).heal("b")
    until(lambda: MemoryStore(cluster.server).get(key))
    assert not cluster.events("fenced")
    assert all(worker.poll() is None for worker in cluster.workers.values())


@pytest.mark.slow
def test_a_cut_ends_after_its_seconds(cluster: Cluster) -> None:
    with ApiClient(cluster.coordinator.url) as api:
        Chaos(api).cut("b", 0.5)
    until(lambda: cluster.events("node_down"))
    until(lambda: connected(cluster, "b"))


def test_places_that_cannot_be_meant_are_refused_before_anybody_is_asked() -> None:
    chaos = Chaos(ApiClient("http://127.0.0.1:9"))
    for wrong in ("alpha", "/0", "alpha/"):
        with pytest.raises(Invalid, match="must be a device"):
            chaos.kill(wrong)
    with pytest.raises(Invalid, match="must be a node"):
        chaos.cut("alpha/0")
    with pytest.raises(Invalid, match="at least 1"):
        chaos.slow("alpha/0", 0.5)


def test_the_data_network_of_one_machine_is_not_cut(cluster: Cluster) -> None:
    with ApiClient(cluster.coordinator.url) as api:
        with pytest.raises(CannotReach, match="only the network between two machines can be cut"):
            Chaos(api).cut_data("a", "b")
        with pytest.raises(CannotReach, match="there is no node 'c'"):
            Chaos(api).heal_data("a", "c")
    done = CliRunner().invoke(elasticd, ["chaos", "cut", "b", "--one-way"])
    assert done.exit_code == 2
    assert "name the other node by --data" in done.output
