"""The commands against a real etcd, coordinator and agent: what they do, and what they say when they cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.records import Keys
from tests.cli.support import call, daemon, refused, until_answered
from tests.etcds import SharedEtcd


@pytest.fixture(scope="module")
def configured(shared_etcd: SharedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The configuration of a cluster with a coordinator, and an agent with two devices; chaos is on."""
    folder = tmp_path_factory.mktemp("cluster")
    path = folder / "elasticd.toml"
    path.write_text(
        f'[cluster]\nname = "{shared_etcd.cluster("commands")}"\n'
        f'[etcd]\nendpoints = ["{shared_etcd.endpoint}"]\n[coordinator]\nport = 0\n'
        f'[agent]\nnode = "n0"\nsocket = "{folder}/a.sock"\ndevices = 2\n[chaos]\nenabled = true\n'
        "[emulate]\nenabled = true\nforward = 1e-4\nbackward = 2e-4\nmemory = '3 MiB'\n"
    )
    options = ("--config", str(path))
    with (
        daemon("elasticd", "coordinator", *options, log=folder / "coordinator.log"),
        daemon("elasticd_agent", *options, log=folder / "agent.log"),
    ):
        until_answered("status", *options, wanted="n0/1")
        yield str(path)


def test_status_finds_the_leader_by_etcd_and_shows_nodes_and_devices(configured: str) -> None:
    said = call("status", "--config", configured).output
    assert "cluster commands-" in said
    assert "n0/0" in said
    assert "3 MiB" in said
    assert "emulated" in said
    assert "no job: start one with elasticd run" in said


def test_status_for_programs_is_the_coordinators_own_answer(configured: str) -> None:
    status = json.loads(call("status", "--json", "--config", configured).output)
    assert [device["name"] for device in status["nodes"][0]["devices"]] == ["n0/0", "n0/1"]


def test_job_that_is_not_there_cannot_be_forgotten(configured: str) -> None:
    assert "there is no job 'demo'; there are: none" in refused("forget", "demo", "--config", configured)


def test_coordinator_is_found_by_its_url_too(configured: str) -> None:
    url = json.loads(call("status", "--json", "--config", configured).output)["leader"]["url"]
    assert "cluster commands-" in call("status", "--coordinator", url).output


def test_chaos_slows_a_device_and_lets_it_recover(configured: str) -> None:
    assert "n0/1 now takes 3 times as long" in call("chaos", "slow", "n0/1", "3", "--config", configured).output
    assert "chaos: 3x slower" in call("status", "--config", configured).output
    assert "n0/1 runs at its normal speed" in call("chaos", "recover", "n0/1", "--config", configured).output
    assert "chaos:" not in call("status", "--config", configured).output


def test_a_key_is_shown_by_its_name_before_release_02_too(configured: str) -> None:
    old, now = (
        call("config", "get", f"detect.{name}", "--config", configured) for name in ("quickest", "min_steps")
    )
    assert old.exit_code == now.exit_code == 0
    assert old.output == now.output


def test_configuration_is_changed_shown_and_given_back(configured: str) -> None:
    where = ("--config", configured)
    assert call("config", "set", "policy.horizon_steps", "50", *where).exit_code == 0
    assert call("config", "get", "policy.horizon_steps", *where).output == "50\n"
    assert "replanning is paused" in call("pause", *where).output
    for command in (("status",), ("top", "--once")):
        assert "replanning is paused: 'elasticd resume' ends that" in call(*command, *where).output
    assert json.loads(call("status", "--json", *where).output)["paused"] is True
    assert call("config", "get", "policy.paused", *where).output == "true\n"
    listed = " ".join(call("config", "get", *where).output.split())
    assert "policy.horizon_steps 50 changed while running" in listed
    assert call("resume", *where).exit_code == 0
    assert "paused" not in call("status", *where).output
    assert call("config", "unset", "policy.horizon_steps", *where).exit_code == 0
    changes = call("config", "history", *where).output.splitlines()
    assert "policy.paused = true" in changes[1]
    assert changes[3].endswith("all as in the file")
    assert "did you mean 'horizon_steps'?" in refused("config", "set", "policy.horizon", "5", *where)
    assert "there is no key 'policy.foo'; there are: " in refused("config", "unset", "policy.foo", *where)
    below = refused("config", "set", "policy.horizon_steps", "-5", *where)
    assert "horizon_steps must be from 1 to 1,000,000,000" in below
    assert "option" not in below
    assert "write true or false" in refused("config", "set", "policy.paused", "maybe", *where)
    assert "'nosuch' is not one of" in call("logs", "--kind", "nosuch", *where).output
    told = call("logs", "--kind", "configured", *where).output
    assert told.count("configuration changed by") == 4


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (("jobs",), {"jobs", "restarts"}),
        (("top",), {"status", "steps", "events"}),
        (("plan",), set()),
        (("config", "get"), {"policy.paused"}),
    ],
)
def test_what_reads_gives_programs_json(command: tuple[str, ...], keys: set[str], configured: str) -> None:
    done = call(*command, "--json", "--config", configured)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert isinstance(found, dict)
    assert keys <= found.keys()


def test_json_of_lists_and_of_one_value(configured: str) -> None:
    where = ("--json", "--config", configured)
    assert isinstance(json.loads(call("config", "history", *where).output), list)
    assert json.loads(call("config", "get", "policy.paused", *where).output) is False
    events = [json.loads(line) for line in call("logs", *where).output.splitlines()]
    assert {"node_up"} <= {event["kind"] for event in events}


def test_job_that_is_not_there_cannot_be_stopped(configured: str) -> None:
    assert "there is no job 'none'; there are: none" in refused("stop", "none", "--config", configured)
    assert "no job: start one with elasticd run" in call("jobs", "--config", configured).output


def test_unknown_device_is_named_with_those_that_are_there(configured: str) -> None:
    said = refused("chaos", "slow", "n7/0", "3", "--config", configured)
    assert "there is no device 'n7/0'; there are: n0/0, n0/1" in said


@pytest.mark.parametrize("factor", ["0.5", "nan", "inf", "-1"])
def test_factor_must_be_a_finite_slowdown(factor: str) -> None:
    assert "must be a number of at least 1" in refused("chaos", "slow", "--", "n0/0", factor)


def in_cluster(name: str, etcd: SharedEtcd, folder: Path) -> str:
    """A configuration that names a cluster and its etcd, and nothing else."""
    path = folder / "e.toml"
    path.write_text(f'[cluster]\nname = "{name}"\n[etcd]\nendpoints = ["{etcd.endpoint}"]\n')
    return str(path)


def test_chaos_is_off_unless_the_configuration_turns_it_on(shared_etcd: SharedEtcd, tmp_path: Path) -> None:
    calm = shared_etcd.cluster("calm")
    path = in_cluster(calm, shared_etcd, tmp_path)
    with daemon("elasticd", "coordinator", "--config", path, "--port", "0", log=tmp_path / "log"):
        until_answered("status", "--config", path, wanted=f"cluster {calm}")
        said = refused("chaos", "slow", "n0/0", "3", "--config", path)
    assert "chaos is off: set enabled = true in section [chaos]" in said


def test_nobody_leading_is_said_with_the_remedy(shared_etcd: SharedEtcd, tmp_path: Path) -> None:
    empty = shared_etcd.cluster("empty")
    said = refused("status", "--config", in_cluster(empty, shared_etcd, tmp_path))
    assert f"nobody leads the cluster '{empty}'" in said
    assert "start a coordinator with 'elasticd coordinator'" in said


def test_foreign_key_in_the_place_of_the_leaders_is_said(shared_etcd: SharedEtcd, tmp_path: Path) -> None:
    foreign = shared_etcd.cluster("foreign")
    with shared_etcd.store() as store:
        store.put(Keys(cluster=foreign).leader, b"not ours")
    said = refused("status", "--config", in_cluster(foreign, shared_etcd, tmp_path))
    assert "does not hold a leader's record" in said


def test_entry_point_ends_with_one_message_and_no_traceback() -> None:
    command = [sys.executable, "-m", "elasticd", "status", "--config", "/nowhere/e.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: cannot read the configuration /nowhere/e.toml")
    assert len(done.stderr.splitlines()) == 1
