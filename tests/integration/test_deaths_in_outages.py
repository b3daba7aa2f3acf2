"""Workers die while etcd or the leader is away: what has to be decided waits, and is decided then.

Each test has a cluster of its own, of real processes.
"""

from __future__ import annotations

import time

import psutil
import pytest

from tests.etcds import SharedEtcd
from tests.integration.fleet import Fleet, exact, until
from tests.integration.test_outages import (
    DOWN_SECONDS,
    NODES,
    binding,
    fenced,
    standing,
    stands_by_again,
    taken_over,
    training,
)
from tests.integration.trio import NAMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def worker(fleet: Fleet, device: str) -> psutil.Process:
    pid = next(member["pid"] for member in fleet.job()["members"] if member["device"] == device)
    return psutil.Process(pid)


def test_death_while_all_of_etcd_is_down_waits_for_it_and_is_dealt_with_then() -> None:
    with training() as fleet:
        revision, leader = fleet.revision(), fleet.leads()
        victim, since = worker(fleet, "b/0"), time.monotonic()
        fleet.etcd.kill(*NAMES)
        victim.kill()
        until(lambda: fleet.job_at(leader.value).get("phase") == "recovering", fleet.said)
        until(lambda: time.monotonic() > since + DOWN_SECONDS, fleet.said, DOWN_SECONDS + 60)
        stood = fleet.steps()
        assert fleet.job_at(leader.value).get("phase") == "recovering", "nothing is decided without etcd"
        fleet.etcd.start(*NAMES)
        until(lambda: fleet.steps() > stood, fleet.said)
        fleet.advanced(10)
        exact(fleet, plans=2)
        assert fenced(fleet, revision) >= 2


def test_death_while_the_leader_is_frozen_is_dealt_with_by_the_next_where_the_worker_joins_again(
    shared_etcd: SharedEtcd,
) -> None:
    with training(shared_etcd) as fleet:
        revision, old, first = fleet.revision(), fleet.leads(), binding(fleet)
        victim, before = worker(fleet, "b/0"), standing(fleet, old.name)
        fleet.freeze(old.name)
        victim.kill()
        stood, new = fleet.steps(), fleet.leads(but=old)
        until(lambda: fleet.steps() > stood + 1, fleet.said)
        fleet.thaw(old.name)
        stands_by_again(fleet, old.name, before)
        fleet.advanced(10)
        assert fleet.leads() == new
        assert all(fleet.epoch(node) == new.term for node in NODES)
        until(lambda: len(now := binding(fleet)) == 2 and now["b/0"] != first["b/0"], fleet.said)
        fleet.advanced(10)
        exact(fleet, plans=3)
        assert fenced(fleet, revision) >= 2


@pytest.mark.full  # the test before this one has a worker that joins again under a new leader
def test_worker_joins_again_under_a_new_leader(shared_etcd: SharedEtcd) -> None:
    with training(shared_etcd) as fleet:
        old, since = fleet.leads(), time.monotonic()
        fleet.kill(old.name)
        taken_over(fleet, old, since)
        before = until(lambda: binding(fleet), fleet.said)
        worker(fleet, "b/0").kill()
        until(lambda: len(now := binding(fleet)) == 2 and now["b/0"] != before["b/0"], fleet.said)
        fleet.advanced(10)
        exact(fleet, plans=3)


def test_etcd_that_is_restored_from_an_older_backup_is_refused_by_all() -> None:
    with training() as fleet:
        backup = fleet.folder / "backup"
        fleet.etcd.back_up(backup)
        with fleet.etcd.store() as store:
            for _ in range(50):
                store.put(f"/elasticd/{fleet.cluster}/mark", b"")
        old = fleet.leads()
        fleet.kill(old.name)
        new = fleet.leads(but=old)
        until(lambda: all(fleet.epoch(node) >= new.term for node in NODES), fleet.said)
        fleet.etcd.restore(backup)
        until(lambda: fleet.processes[new.name].poll() is not None, fleet.said)
        assert fleet.processes[new.name].returncode == 1
        said = fleet.log(new.name).strip().splitlines()[-1]
        assert "it was restored from an old copy" in said
        assert f"{fleet.cluster}-coordinator-{new.name}.json" in said
        for node in NODES:
            until(lambda node=node: "restored from an old copy" in fleet.log(node), fleet.said)
        fleet.advanced(20)
