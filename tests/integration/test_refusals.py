"""Bad input ends with one clear line and harms no running job."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from elasticd_agent.daemon import Agent

from elasticd.config.tree import with_overrides
from elasticd.store.memory import MemoryStore
from elasticd.testing.waiting import until
from elasticd.wire.api_types import ApiError
from tests import forkserver
from tests.integration import train
from tests.integration.cluster import JOB, Cluster
from tests.integration.test_switch import SETTINGS, plan_of, stage

SCRIPT = Path(train.__file__)


def run_alone(environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """The exit code of a worker that no torchrun started, and what it says on standard error."""
    base = {
        name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ELASTICD"))
    }
    errors = folder / "errors"
    ended = forkserver.start(
        SCRIPT, environment={**base, **environment}, output=folder / "output", errors=errors
    )
    return ended.wait(180), errors.read_text()


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert not any(line.startswith("Traceback") for line in lines), text
    return lines[-1] if lines else ""


STARTED = {"TORCHELASTIC_RUN_ID": JOB, "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2", "OPTIONS": '{"out": "/", "steps": 1}'}, "start the script with 'elasticd run"),
        (
            {**STARTED, "ELASTICD_SOCKET": "/nonexistent/agent.sock", "OPTIONS": '{"out": "/", "steps": 1}'},
            "no agent listens at /nonexistent/agent.sock: start one ('elasticd up' on one machine",
        ),
        (
            {**STARTED, "OPTIONS": '{"out": "/", "steps": 1, "global_batch": 7, "micro_batch": 2}'},
            "global_batch 7 does not divide into micro-batches of 2: choose a multiple of 2",
        ),
    ],
)
def test_a_script_that_cannot_start_says_so_in_one_line(
    environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    code, errors = run_alone(environment, tmp_path)
    assert code == 1
    line = last_line(errors)
    assert line.startswith("elasticd: ")
    assert said in line


@pytest.mark.slow
def test_memory_that_cannot_fit_is_refused_with_the_shortfall() -> None:
    with Cluster({"a": 1, "b": 1}, memory=100_000) as cluster:
        cluster.run(SCRIPT, steps=5)
        codes = cluster.wait()
        assert set(codes.values()) == {1}
        for device in codes:
            line = last_line(cluster.log(device))
            assert line.startswith("elasticd: ")
            assert "more on" in line, line
            assert "smaller micro-batches need less" in line, line
        assert cluster.job()["phase"] == "stopped"


@pytest.mark.slow
def test_a_device_that_stands_by_ends_with_the_job() -> None:
    plans = {"": plan_of((3, [stage(0, 3, ("a/0", 1))]), idle=("b/0",))}
    with Cluster({"a": 1, "b": 1}, plans=plans, settings=SETTINGS, forward=1e-4) as cluster:
        cluster.run(SCRIPT, steps=8)
        assert cluster.wait() == {"a/0": 0, "b/0": 0}
        assert (cluster.folder / "ledger-b:0").read_text() == ""
        assert len((cluster.folder / "ledger-a:0").read_text().splitlines()) == 8


@pytest.mark.slow
def test_a_running_job_is_not_harmed_by_what_is_refused() -> None:
    plans = {"": plan_of((3, [stage(0, 3, ("a/0", 1), ("a/1", 1))]))}
    with Cluster({"a": 2}, plans=plans, settings=SETTINGS, forward=1e-4) as cluster:
        cluster.run(SCRIPT, steps=100_000)
        cluster.runs(1, steps=2)
        pids = [member["pid"] for member in cluster.job()["members"]]

        with pytest.raises(ApiError, match="there is no device 'a/9'; there are: a/0, a/1"):
            cluster.pace("a/9", 3.0)
        with pytest.raises(ApiError, match="at least 1"):
            cluster.pace("a/0", 0.5)
        assert "is served by agent" in second_agent(cluster)
        assert "runs already" in late_join(cluster)
        assert "a device belongs to one job at a time" in second_worker(cluster)

        step = cluster.job()["step"]
        until(lambda: cluster.job()["step"] > step + 3)
        assert cluster.job()["phase"] == "running"
        assert [member["pid"] for member in cluster.job()["members"]] == pids
        assert all(worker.poll() is None for worker in cluster.workers.values())


def second_agent(cluster: Cluster) -> str:
    """Another agent under the name of a node that has one."""
    config = with_overrides(
        cluster.config, {"agent.node": "a", "agent.socket": cluster.socket("other"), "agent.devices": 1}
    )

    async def claim() -> str:
        try:
            await asyncio.wait_for(Agent(config, MemoryStore(cluster.server)).run(), 20)
        except Exception as error:
            return str(error)
        return "it was let in"

    return cluster.call(claim())


JOIN = """
import os, sys
from elasticd.codec.message import encode
from elasticd.wire import unix_socket
from elasticd.wire.rendezvous import Join
from elasticd.wire.worker import Rejected, to_worker
sock = unix_socket.connect(sys.argv[1], 5)
join = Join(job=sys.argv[2], min_nodes=1, max_nodes=1, pid=os.getpid())
unix_socket.send(sock, encode(join))
answer = to_worker(unix_socket.receive(sock))
assert isinstance(answer, Rejected), answer
print(answer.reason)
"""


def late_join(cluster: Cluster) -> str:
    """A second torchrun (a process of its own) on a node whose torchrun has joined long ago."""
    command = [sys.executable, "-c", JOIN, cluster.socket("a"), JOB]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def second_worker(cluster: Cluster) -> str:
    """A worker for a device that has one."""
    environment = {**STARTED, "ELASTICD_SOCKET": cluster.socket("a"), "OPTIONS": '{"out": "/", "steps": 1}'}
    code, errors = run_alone(environment, cluster.folder)
    assert code == 1
    return last_line(errors)
