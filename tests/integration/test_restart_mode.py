"""Restart mode: plain torch scripts under real torchruns, through what can happen to them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elasticd.chaos.client import Chaos
from elasticd.client import ApiClient
from elasticd.store.server import EtcdServer
from elasticd.testing.waiting import until
from tests import sizes
from tests.etcds import SharedEtcd
from tests.integration.torchruns import EXAMPLES, RestartJob
from tests.liveness import living
from tests.torchruns import end

SCRIPTS = DDP, FSDP2 = EXAMPLES / "ddp.py", EXAMPLES / "fsdp2.py"
WATCHED = Path(__file__).with_name("watched.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.full  # the test of a job that is run again under its name does the same, twice
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_plain_script_runs_to_its_end_over_two_nodes(script: Path, shared_etcd: SharedEtcd) -> None:
    with RestartJob(shared_etcd, {"a": 1, "b": 1}, script, "--steps=12", nnodes="2") as job:
        runs = [job.start("a"), job.start("b")]
        assert [run.wait() for run in runs] == [0, 0], job.said()
        assert {run.said.count("Traceback") for run in runs} == {0}, job.said()
        assert sorted(job.losses()) == list(range(12))


# In make test test_run_any_script kills a worker of a script with FSDP2 and looks at each step; here one of
# another node is killed where the status of a plain torchrun is looked at.
@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_killed_worker_restarts_all_from_the_last_checkpoint(script: Path, shared_etcd: SharedEtcd) -> None:
    with RestartJob(shared_etcd, {"a": 1, "b": 1}, script, "--steps=60", "--pause=0.1", nnodes="2") as job:
        runs = [job.start("a"), job.start("b")]
        job.runs(2, steps=12)
        os.kill(runs[1].workers()[0], signal.SIGKILL)
        assert [run.wait() for run in runs] == [0, 0], job.said()
        losses = job.losses()
        assert sorted(losses) == list(range(60))
        # Steps that were made again give what they gave before.
        assert all(len(values) == 1 for values in losses.values()), losses


def test_node_that_is_gone_leaves_the_others_to_go_on_and_one_that_comes_is_taken_in(
    shared_etcd: SharedEtcd,
) -> None:
    with RestartJob(
        shared_etcd, {"a": 1, "b": 1, "c": 1}, DDP, "--steps=100000", "--pause=0.05", nnodes="1:3"
    ) as job:
        job.start("a")
        b = job.start("b")
        job.runs(2)
        job.lose_agent("b")  # and with it the node's lease
        for worker in b.kill():
            end(worker)
        job.runs(1)
        c = job.start("c")
        job.runs(2)
        c.process.send_signal(signal.SIGTERM)
        assert c.wait() != 0
        job.runs(1)


def test_torchrun_killed_takes_its_workers_along_and_the_others_go_on(shared_etcd: SharedEtcd) -> None:
    with RestartJob(shared_etcd, {"a": 1, "b": 1}, DDP, "--steps=100000", "--pause=0.05", nnodes="1:2") as job:
        job.start("a")
        b = job.start("b")
        job.runs(2)
        orphans = b.kill()
        until(lambda: not living(orphans))
        job.runs(1)


def test_etcd_that_is_killed_and_started_again_restarts_nobody() -> None:
    options = ("--steps=100000", "--pause=0.05")
    with (
        EtcdServer(fsync=False) as etcd,
        RestartJob(etcd, {"a": 1, "b": 1}, DDP, *options, nnodes="1:2") as job,
    ):
        runs = [job.start("a"), job.start("b")]
        job.runs(2)
        workers = [run.workers() for run in runs]
        etcd.restart()
        job.runs(2, steps=60)
        assert [run.workers() for run in runs] == workers
        # And a death is still seen, and all start again in a round that is made in the new one.
        os.kill(workers[1][0], signal.SIGKILL)
        until(lambda: runs[0].workers() and runs[0].workers() != workers[0], job.said)
        job.runs(2)


def test_agent_that_is_started_again_restarts_nobody(shared_etcd: SharedEtcd) -> None:
    with RestartJob(shared_etcd, {"a": 1, "b": 1}, DDP, "--steps=100000", "--pause=0.05", nnodes="1:2") as job:
        runs = [job.start("a"), job.start("b")]
        job.runs(2)
        workers = [run.workers() for run in runs]
        job.cluster.restart_agent("b")
        job.runs(2, steps=60)
        assert [run.workers() for run in runs] == workers
        # And it is attended to again: a death is still seen.
        os.kill(workers[1][0], signal.SIGKILL)
        until(lambda: runs[0].workers() and runs[0].workers() != workers[0], job.said)
        job.runs(2)


def test_job_that_was_ended_can_be_run_again_under_its_name(shared_etcd: SharedEtcd) -> None:
    with RestartJob(shared_etcd, {"a": 1, "b": 1}, DDP, "--steps=12", nnodes="2") as job:
        for _ in range(2):
            runs = [job.start("a"), job.start("b")]
            assert [run.wait() for run in runs] == [0, 0], job.said()
            assert {run.said.count("Traceback") for run in runs} == {0}, job.said()
        assert sorted(job.losses()) == list(range(12))


@pytest.mark.parametrize("script", sizes.beside([DDP], SCRIPTS), ids=lambda script: script.stem)
def test_watch_tells_the_straggler_apart_though_all_wait_for_it(script: Path, shared_etcd: SharedEtcd) -> None:
    options = (f"--script={script}", "--steps=100000", "--pause=0.02")
    with RestartJob(shared_etcd, {"a": 1, "b": 1}, WATCHED, *options, nnodes="2") as job:
        job.start("a")
        job.start("b", "--pause=1.2")
        until(lambda: "slow" in {event["kind"] for event in job.cluster.events()}, job.said)

        def told() -> Any:
            """The status, once it says so; on a busy machine each device computes for longer than it pauses."""
            shown = job.status()
            return shown if shown["devices"]["b/0"]["ratio"] > 3 else None

        shown = until(told, job.said)
        slow, fast = shown["devices"]["b/0"], shown["devices"]["a/0"]
        assert slow["seconds"] > 1.2, shown
        # The other's steps take as long, and its own computation is told apart all the same.
        assert fast["seconds"] < shown["step_seconds"] / 2, shown
        assert shown["out"] == {}  # there must be two nodes
        (event,) = job.cluster.events("slow")
        assert event["text"].startswith("b/0 is slow")


def test_slow_node_is_left_out_where_going_on_without_it_is_faster_and_stands_by(
    shared_etcd: SharedEtcd,
) -> None:
    options = (f"--script={DDP}", "--steps=250", "--pause=0.02")
    with RestartJob(shared_etcd, {"a": 1, "b": 1, "c": 1}, WATCHED, *options, nnodes="1:3") as job:
        runs = {node: job.start(node) for node in "ac"}
        slow = job.start("b", "--pause=1.5")
        until(lambda: job.cluster.events("excluded"), job.said, seconds=200)
        job.runs(2, steps=20)
        until(lambda: "this node stands by" in slow.said, job.said)
        assert slow.workers() == []
        assert slow.process.poll() is None
        codes = [run.wait() for run in (*runs.values(), slow)]
        assert codes == [0, 0, 0], job.said()
        texts = [event["text"] for event in job.cluster.events("excluded")]
        assert [text for text in texts if "b/0 takes" not in text] == [], (
            "nobody else is put out, however busy it is"
        )
        assert len(job.status()["out"]) == 1, "status tells who is out"


def test_chaos_kills_a_watched_worker_and_all_go_on(shared_etcd: SharedEtcd) -> None:
    options = (f"--script={DDP}", "--steps=60", "--pause=0.1")
    with RestartJob(shared_etcd, {"a": 2}, WATCHED, *options, nnodes="1") as job:
        run = job.start("a")
        job.runs(2, steps=3)
        with ApiClient(job.cluster.coordinator.url) as api:
            until(lambda: "a/1" in job.status()["devices"], job.said)
            Chaos(api).kill("a/1")
        until(lambda: job.status()["restarts"] == 1, job.said)
        assert run.wait() == 0, job.said()


def test_plain_torchrun_stands_in_the_status_with_its_workers_devices_and_end(shared_etcd: SharedEtcd) -> None:
    options = ("--steps=40", "--pause=0.1")
    with RestartJob(shared_etcd, {"a": 2, "b": 1}, DDP, *options, nnodes="2") as job:
        runs = [job.start("a"), job.start("b")]
        job.runs(3, steps=3)
        until(lambda: job.status().get("workers") == 3, job.said)
        shown = job.status()
        assert (shown["phase"], shown["members"]) == ("running", ("a/0", "a/1", "b/0"))
        assert shown["sentence"].startswith("3 workers on a, b")
        gathered = [event["text"] for event in job.cluster.events("job_gathered")]
        assert gathered == ["round 0 in restart mode: 3 workers"]
        os.kill(runs[1].workers()[0], signal.SIGKILL)
        until(lambda: job.status()["restarts"] == 1, job.said)
        assert [run.wait() for run in runs] == [0, 0], job.said()
        until(lambda: job.status().get("phase") == "finished", job.said)
        assert job.status()["members"] == ()
