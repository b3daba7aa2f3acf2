"""A cluster is upgraded from the release before while its job trains on: the coordinator, the agents, and the
coordinator back again. Workers of both releases do not train together: one of the new is refused, and the job
is started again with the new. Real processes of both releases, and a real etcd."""

from __future__ import annotations

import compileall
import re
import runpy
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import elasticd
from elasticd.store.leader import ElectedLeader
from elasticd.testing.waiting import until
from tests.etcds import SharedEtcd
from tests.integration.fleet import PATIENCE, Fleet, exact
from tests.releases import kept

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NODES = ("a", "b")
FOREVER = 1_000_000
#: Steps that the job makes between two upgrades.
STEPS = 3
#: Seconds that a token takes in a block: the job goes on all the time, and is not to keep the cores busy.
FORWARD = 1.5e-3


@contextmanager
def training(release: str, shared_etcd: SharedEtcd) -> Iterator[Fleet]:
    """Two nodes of one device each, all of it of a release that was; `imports_from` says who still runs it."""
    with (
        tempfile.TemporaryDirectory(prefix="ed-") as name,
        Fleet(shared_etcd, Path(name), forward=FORWARD) as fleet,
    ):
        old = fleet.folder / "old"
        with zipfile.ZipFile(kept.wheel(release)) as wheel:
            wheel.extractall(old)
        compileall.compile_dir(old, quiet=1)  # once, and not by each process that starts now
        fleet.imports_from = dict.fromkeys(("c0", "c2", *NODES, *(f"run-{node}" for node in NODES)), old)
        fleet.coordinator("c0")
        for node in NODES:
            fleet.agent(node, 1)
        for node in NODES:
            fleet.run(node, 1, "1:2", FOREVER, kept.script(release))
        until(lambda: len(incarnations(fleet)) == len(NODES), fleet.said)
        heard(fleet)
        yield fleet


def incarnations(fleet: Fleet) -> dict[str, str]:
    plan = fleet.job().get("plan")
    return dict(plan["binding"]) if plan else {}


def released(fleet: Fleet) -> dict[str, str]:
    """Of coordinators and agents that run: the release that each said when it was started last."""
    said = {
        name: re.findall(r"elasticd (\S+): (?:a coordinator|the agent) of", fleet.log(name))
        for name in fleet.processes
    }
    return {name: releases[-1] for name, releases in said.items() if releases}


def heard(fleet: Fleet) -> None:
    """Waits until the leader knows all workers, and has heard of some more steps of theirs."""
    until(lambda: len(fleet.job().get("members", [])) == len(NODES), fleet.said)
    fleet.advanced(STEPS)
    goal = fleet.steps()
    until(lambda: (fleet.job().get("step") or 0) >= goal, fleet.said)


@pytest.mark.parametrize("release", kept.RELEASED[-1:])
def test_every_part_of_a_cluster_is_upgraded_while_its_job_trains_on(
    release: str, shared_etcd: SharedEtcd
) -> None:
    new = elasticd.__version__
    with training(release, shared_etcd) as fleet:
        before, led = incarnations(fleet), fleet.leads()
        assert released(fleet) == {"c0": release, "a": release, "b": release}

        # The coordinator: agents and workers of the old release obey one of the new.
        led = led_by(fleet, "c1", led)
        assert released(fleet) == {"c1": new, "a": release, "b": release}

        # The agents, one after another: workers of the old release come back to agents of the new.
        for node in NODES:
            stop(fleet, node)
            del fleet.imports_from[node]
            fleet.agent(node, 1)
            until(lambda node=node: released(fleet)[node] == new, fleet.said)
            heard(fleet)
            assert f"is of elasticd {release}, this agent of {new}" in fleet.log(node), "its worker is old"

        # The coordinator back: agents of the new release obey one of the old.
        led = led_by(fleet, "c2", led)
        assert released(fleet) == {"c2": release, "a": new, "b": new}
        assert incarnations(fleet) == before, "no worker was started again"

        # The workers: one of the new release cannot join those of the old, which train on; so the job is ended
        # and started again, and makes the same steps.
        led_by(fleet, "c3", led)
        refused_beside_the_old(fleet, *NODES)
        with fleet.api() as api:
            api.forget("job", by="the test")
        for node in NODES:
            fleet.run(node, 1, "1:2", FOREVER, kept.script(release))
        until(lambda: len(incarnations(fleet)) == len(NODES), fleet.said)
        until(lambda: (fleet.job().get("step") or 0) >= STEPS, fleet.said)
        assert not fleet.imports_from.keys() & fleet.processes.keys()
        exact(fleet, plans=2, config=runpy.run_path(str(kept.script(release)))["CONFIG"])


def led_by(fleet: Fleet, name: str, before: ElectedLeader) -> ElectedLeader:
    """Another coordinator takes over from the one that leads, which is killed."""
    fleet.coordinator(name)
    fleet.kill(before.name)
    led = fleet.leads(but=before)
    assert led.name == name
    heard(fleet)
    return led


def stop(fleet: Fleet, name: str) -> None:
    """Ends a process in good order."""
    fleet.processes[name].terminate()
    fleet.processes.pop(name).wait(60)


def refused_beside_the_old(fleet: Fleet, first: str, other: str) -> None:
    """The worker of `first` is of the new release, that of `other` of the old. Both have ended afterwards."""
    device, name = f"{first}/0", f"run-{first}"
    stop(fleet, name)
    until(lambda: device not in incarnations(fleet), fleet.said)
    fleet.advanced(STEPS)
    del fleet.imports_from[name]
    fleet.run(first, 1, "1:2", FOREVER, kept.script(kept.RELEASED[-1]))
    # It would be refused after each of the restarts that its torchrun has: the first refusal ends all.
    assert fleet.processes[name].wait(PATIENCE) == 1
    assert "exchanges version" in fleet.log(name)
    assert sum(path.name.startswith(f"ledger-{first}:0-") for path in fleet.folder.iterdir()) == 2
    fleet.processes.pop(name)
    fleet.advanced(STEPS)
    assert device not in incarnations(fleet)
    stop(fleet, f"run-{other}")
    del fleet.imports_from[f"run-{other}"]
    until(lambda: fleet.shown()["phase"] == "stopped", fleet.said)
