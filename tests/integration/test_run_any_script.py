"""`elasticd run` with scripts of users who never heard of it, and with scripts that fail."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import psutil
import pytest

from elasticd.chaos.client import Chaos
from elasticd.client import ApiClient, CannotReach
from elasticd.testing.waiting import until
from tests import forkserver, sizes
from tests.integration.cluster import ROOT
from tests.integration.launches import Launched, Launches, reaches, steps, torchrun_workers
from tests.integration.torchruns import EXAMPLES
from tests.liveness import living

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TRAIN = Path(__file__).with_name("train.py")
OTHERS = Path(__file__).resolve().parents[1] / "scripts"
DDP, TRAINER = EXAMPLES / "ddp.py", OTHERS / "trainer.py"
FSDP2 = EXAMPLES / "fsdp2.py"
SCRIPTS = (DDP, TRAINER, FSDP2, OTHERS / "accelerated.py", OTHERS / "lightning_module.py")


@pytest.fixture(scope="module")
def launches() -> Iterator[Launches]:
    with Launches({"a": 2}) as launches:
        yield launches


@pytest.fixture(autouse=True)
def _end_of_runs(launches: Launches) -> Iterator[None]:
    yield
    launches.end()


def workers(run: Launched) -> list[psutil.Process]:
    return torchrun_workers(psutil.Process(run.process.pid))


@pytest.mark.parametrize("script", sizes.beside([FSDP2], SCRIPTS), ids=lambda script: script.stem)
def test_script_without_a_job_goes_on_in_restart_mode_and_survives_a_killed_worker(
    script: os.PathLike[str], launches: Launches
) -> None:
    name = f"plain-{os.path.basename(script)[:-3]}"
    folder = launches.cluster.folder / name
    folder.mkdir()
    command = ("--job", name, str(script), "--steps=40", "--pause=0.05", "--save-every=5", f"--folder={folder}")
    run = launches.run("a", *command)
    reaches(run, 12)
    makes = "elasticd: the script makes no elasticd.Job or elasticd.live"
    assert run.ours[-1].startswith(f"{makes}: it goes on in restart mode")
    pids = workers(run)
    assert len(pids) == 2, run.said
    pids[0].send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.said
    losses = steps(run.said)
    assert sorted(losses) == list(range(40))
    assert all(len(values) == 1 for values in losses.values()), "steps that were made again give the same"
    assert launches.job(name) == {}, "the live mode knows nothing of it any more"


def test_script_that_raises_the_same_exception_twice_ends_at_once_with_one_line_and_its_exit_code(
    launches: Launches,
) -> None:
    script = launches.script("import sys\nprint('began', flush=True)\n{}['inputs']\n")
    run = launches.run("a", "--job", "wrong", script)
    assert run.wait() == 1
    assert run.said.count("began") <= 3, "two workers, of which one may have been started again"
    assert len(run.ours) == 1, run.ours
    assert "KeyError: 'inputs'" in run.ours[0]
    job = launches.job("wrong")
    assert (job["phase"], job["exception"]["kind"]) == ("stopped", "KeyError")
    assert "KeyError: 'inputs'" in job["reason"]
    assert "{}['inputs']" in job["exception"]["traceback"]
    texts = [event["text"] for event in launches.cluster.events("raised") if event["job"] == "wrong"]
    assert any("KeyError: 'inputs'" in text for text in texts)
    for command in (("status", "wrong"), ("why", "wrong"), ("logs", "wrong"), ("jobs",)):
        assert "KeyError: 'inputs'" in launches.ask(*command), command


ODD, MODULE = "argued.py --log 3 -h --nnodes 9 ${local_rank}", "-m argued --log 3 -m --"
COMMANDS = (ODD, "argued.py -- --log 3", MODULE)


@pytest.mark.parametrize(
    ("mode", "line"),
    sizes.beside([("live", MODULE), ("restart", ODD)], list(product(("live", "restart"), COMMANDS))),
)
def test_script_gets_the_arguments_behind_it_as_they_are_in_either_mode(
    mode: str, line: str, launches: Launches
) -> None:
    command = line.split()
    script = launches.script("import sys\nprint(repr(sys.argv[1:]), flush=True)\n", "argued.py")
    expected = repr([*command[2 if command[0] == "-m" else 1 :]])
    named = [str(script) if word == script.name else word for word in command]
    options = ("--job", f"argued-{mode}", "--devices", "1", "--mode", mode)
    # A module is found by a path. Workers with another path than ours are not forked: each imports torch.
    path = {"PYTHONPATH": f"{script.parent}:{forkserver.ROOT}"} if command[0] == "-m" else {}
    run = launches.run("a", *options, *named, **path)
    assert run.wait() == 0, run.said
    assert expected in run.said


def test_exit_code_of_a_script_that_fails_is_that_of_elasticd_run(launches: Launches) -> None:
    script = launches.script("import sys\nsys.exit(7)\n")
    for mode in ("live", "restart"):
        run = launches.run("a", "--job", f"code-{mode}", "--mode", mode, script)
        assert run.wait() == 7, run.said
        ended = [line for line in run.ours if "all start again" not in line]
        assert len(ended) == 1, run.ours
        assert "ended with exit code 7" in run.ours[0]


#: A script whose Job is refused.
REFUSED = f"""
import runpy
print("began", flush=True)
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""
ODD_BATCH = '{"out": "/", "steps": 1, "global_batch": 7, "micro_batch": 2}'


def test_script_that_elasticd_refuses_ends_at_once_with_one_line(launches: Launches) -> None:
    run = launches.run("a", "--job", "refused", launches.script(REFUSED), OPTIONS=ODD_BATCH)
    assert run.wait() == 1
    assert run.said.count("began") <= 2, "no worker was started again"
    assert len(run.ours) == 1, run.ours
    assert "Traceback" not in run.said
    assert launches.job("refused")["phase"] == "stopped"
    assert run.ours[0].removeprefix("elasticd: ") in launches.job("refused")["reason"]


def test_job_that_failed_before_its_first_plan_is_started_again_under_its_name(launches: Launches) -> None:
    run = launches.run("a", "--job", "again", launches.script("{}['inputs']\n"))
    assert run.wait() == 1
    run = launches.run("a", "--job", "again", launches.script("raise SystemExit(0)\n"))
    assert run.wait() == 0, run.said
    until(lambda: "before a first step" in launches.job("again").get("reason", ""))


def test_script_that_makes_a_job_and_torchs_group_is_told_which_one_to_leave_out(launches: Launches) -> None:
    before = "import torch.distributed as dist\ndist.init_process_group('gloo')\n" + REFUSED
    run = launches.run("a", "--job", "both", launches.script(before), OPTIONS=ODD_BATCH)
    assert run.wait() == 1
    assert "leave that call out" in run.ours[-1]
    assert run.said.count("began") <= 2


def test_job_that_was_stopped_goes_on_under_its_name_and_one_that_finished_begins_anew_by_fresh_alone(
    launches: Launches,
) -> None:
    kept = launches.cluster.folder / "kept"
    checkpointing = {"folder": str(kept), "every": 5}

    def given(steps: int, *more: str) -> Launched:
        options = {"out": str(launches.cluster.folder), "steps": steps, "job": {"checkpointing": checkpointing}}
        return launches.run("a", "--job", "lives", *more, TRAIN, OPTIONS=json.dumps(options))

    run = given(100_000)
    until(lambda: launches.job("lives").get("step", 0) >= 12, said(run))
    launches.cluster.call(stop(launches, "lives"))
    run.wait()
    stopped = launches.job("lives")
    assert stopped["phase"] == "stopped", stopped
    plan = stopped["plan"]["number"]

    run = given(40)
    until(lambda: launches.job("lives")["phase"] == "running" and launches.job("lives")["step"], said(run))
    first = launches.job("lives")["step"]
    assert first > 10, "from its newest checkpoint"
    assert launches.job("lives")["plan"]["number"] > plan, "numbers grow over the lives of a job"
    assert run.wait() == 0, run.said
    assert (launches.job("lives")["phase"], launches.job("lives")["step"]) == ("done", 40)
    assert run.said.splitlines()[-1].startswith("elasticd: job lives finished after 40 steps")
    assert run.said.count("finished after 40 steps") == 1
    again = [event["text"] for event in launches.cluster.events("started_again") if event["job"] == "lives"]
    assert len(again) == 1
    assert "it was stopped" in again[0]

    run = given(40)
    assert run.wait() == 0
    assert len(run.ours) == 1, run.ours
    nothing = "elasticd: nothing to do: job lives is over: it finished after 40 steps; with --fresh"
    assert run.ours[0].startswith(nothing)

    run = given(7, "--fresh")
    assert run.wait() == 0, run.said
    assert (launches.job("lives")["phase"], launches.job("lives")["step"]) == ("done", 7)


def said(run: Launched) -> Callable[[], str]:
    return lambda: run.said


async def stop(launches: Launches, job: str) -> None:
    launches.cluster.coordinator.commands.stop(job, 60.0, "a test")


def test_second_start_beside_a_job_that_runs_disturbs_nothing(launches: Launches) -> None:
    options = {"out": str(launches.cluster.folder), "steps": 100_000}  # it is stopped at the end
    command = ("--job", "busy", TRAIN)
    run = launches.run("a", *command, OPTIONS=json.dumps(options))
    until(lambda: launches.job("busy").get("step", 0) >= 3, said(run))
    second = launches.run("a", *command, OPTIONS=json.dumps(options))
    assert second.wait() == 1
    assert "job busy runs already" in second.said
    assert "elasticd stop busy" in second.said
    assert "rdzv" not in second.said
    step = launches.job("busy")["step"]
    until(lambda: launches.job("busy")["step"] > step + 3)
    assert launches.job("busy")["phase"] == "running"
    launches.cluster.call(stop(launches, "busy"))
    run.wait()


def test_job_in_restart_mode_stands_in_the_status_with_its_workers_restarts_and_its_end(
    launches: Launches,
) -> None:
    folder = launches.cluster.folder / "shown"
    folder.mkdir()
    options = ("--steps=200", "--pause=0.05", "--save-every=5", f"--folder={folder}")
    run = launches.run("a", "--job", "shown", "--mode", "restart", DDP, *options)
    reaches(run, 6)
    job = until(lambda: launches.restarting("shown"))
    assert (job["phase"], job["nodes"], job["workers"], job["restarts"]) == ("running", ("a",), 2, 0)
    assert job["sentence"] == "2 workers on a; no steps heard (elasticd.watch())"
    with (
        ApiClient(launches.cluster.coordinator.url) as api,
        pytest.raises(CannotReach, match="use its process id"),
    ):
        Chaos(api).kill("a/0")
    workers(run)[0].send_signal(signal.SIGKILL)
    until(lambda: launches.restarting("shown")["restarts"] == 1, said(run))
    until(lambda: launches.restarting("shown")["phase"] == "running", said(run))
    job = launches.restarting("shown")
    assert "its workers were started again 1 time" in job["sentence"]
    assert "a worker failed: ended by signal SIGKILL" in job["sentence"]
    second = launches.run("a", "--job", "shown", "--mode", "live", DDP, *options)
    assert second.wait() == 1
    assert "job shown runs in restart mode: start this part of it without --mode live" in second.ours[-1]
    assert run.wait() == 0, run.said
    until(lambda: launches.restarting("shown")["phase"] != "running", said(run))


def test_killed_worker_in_restart_mode_has_a_line_and_ctrl_c_is_the_jobs_reason(launches: Launches) -> None:
    folder = launches.cluster.folder / "interrupted"
    folder.mkdir()
    options = ("--steps=100000", "--pause=0.05", "--save-every=5", f"--folder={folder}")
    run = launches.run("a", "--job", "interrupted", "--mode", "restart", DDP, *options)
    reaches(run, 6)
    workers(run)[0].send_signal(signal.SIGKILL)
    died = re.compile(r"elasticd: worker a/[01] died \(SIGKILL\): all start again \(1\)")
    until(lambda: any(died.fullmatch(line) for line in run.ours), said(run))
    until(lambda: launches.restarting("interrupted")["restarts"] == 1, said(run))
    until(lambda: launches.restarting("interrupted")["phase"] == "running", said(run))
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT, run.said
    until(lambda: launches.restarting("interrupted")["phase"] == "stopped", said(run))
    sentence = "stopped by SIGINT; its workers were started again 1 time"
    assert launches.restarting("interrupted")["sentence"] == sentence


def test_failure_of_a_script_in_restart_mode_is_in_the_status_and_the_events(launches: Launches) -> None:
    text = "import torch.distributed as dist\ndist.init_process_group('gloo')\n{}['inputs']\n"
    run = launches.run("a", "--job", "failing", launches.script(text))
    assert run.wait() == 1
    assert "KeyError: 'inputs'" in run.ours[-1]
    assert run.said.count("Traceback") <= 4, "two attempts of two workers"
    until(lambda: launches.restarting("failing").get("phase") == "failed", said(run))
    job = launches.restarting("failing")
    assert "KeyError: 'inputs'" in job["sentence"]
    assert "{}['inputs']" in job["failure"]
    kinds = [event["kind"] for event in launches.cluster.events() if event["job"] == "failing"]
    assert kinds.count("stopped") == 1
    for command in (("status", "failing"), ("logs", "failing"), ("jobs",)):
        assert "KeyError: 'inputs'" in launches.ask(*command), command
    assert "worker_lost" in kinds


def test_nodes_of_a_script_without_a_job_all_go_on_in_restart_mode() -> None:
    with Launches({"a": 1, "b": 1}) as launches:
        folder = launches.cluster.folder / "two"
        folder.mkdir()
        command = ("--job", "two", "--nnodes", "2", DDP, "--steps=12", f"--folder={folder}")
        runs = [launches.run(node, *command) for node in "ab"]
        assert [run.wait() for run in runs] == [0, 0], [run.said for run in runs]
        assert sorted(steps(runs[0].said) | steps(runs[1].said)) == list(range(12))
        until(lambda: launches.restarting("two").get("phase") == "finished")
        assert launches.restarting("two")["nodes"] == ("a", "b")
        assert launches.job("two") == {}


def test_script_that_is_long_in_coming_to_its_job_is_waited_for_and_stopped_at_once(launches: Launches) -> None:
    run = launches.run("a", "--job", "slow", launches.script("import time\ntime.sleep(1000)\n"))
    words = "its workers run, and none has made an elasticd.Job or called elasticd.live so far"
    until(lambda: launches.job("slow").get("reason") == words, said(run))
    assert launches.restarting("slow") == {}, "time is no evidence"
    launches.cluster.call(stop(launches, "slow"))
    assert run.wait(60) == 0
    assert "stopped by a test" in launches.job("slow")["reason"]
    assert len([line for line in run.ours if "stopped by a test" in line]) == 1, run.ours
    assert "Traceback" not in run.said


def test_devices_of_a_job_in_restart_mode_are_its_own_and_their_output_is_found_under_their_names(
    launches: Launches,
) -> None:
    folder = launches.cluster.folder / "held"
    folder.mkdir()
    options = (DDP, "--steps=100000", "--pause=0.05", "--save-every=1000", f"--folder={folder}")
    placed = ("--nnodes", "1:2", "--device-ids", "1", "--log-dir", folder)
    run = launches.run("a", "--job", "held", *placed, *options)
    reaches(run, 4)
    until(lambda: launches.restarting("held").get("members") == ("a/1",), said(run))
    table = launches.ask("status")
    assert re.search(r"a/1 +held", table), table
    assert re.search(r"a/0 +-", table), table
    assert re.search(r"step \d+ ", launches.ask("logs", "--worker", "a/1"))
    assert "a-1.1.log" in [path.name for path in (folder / "held").iterdir()]

    for mode in ("restart", "auto"):
        other = launches.run("a", "--job", "other", "--mode", mode, "--device-ids", "1", *options)
        assert other.wait() == 1
        assert "--device-ids 1: used are a/1 by job held" in other.ours[-1]
    both = launches.run("a", "--job", "other", "--mode", "restart", *options)
    assert both.wait() == 1
    assert "2 devices are asked for, and 1 is free: used are a/1 by job held" in both.ours[-1]
    beside = launches.run("a", "--job", "beside", "--devices", "1", "--mode", "restart", *options)
    reaches(beside, 2)
    until(lambda: launches.restarting("beside").get("members") == ("a/0",), said(beside))
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    until(lambda: launches.restarting("held").get("members") == ())
    assert launches.restarting("held")["phase"] == "stopped"
    said_by_stop = launches.ask("stop", "beside")
    assert "job beside is stopped: stopped by " in said_by_stop
    assert beside.wait() == 0, beside.said
    assert [line for line in beside.ours if "stopped by" in line], beside.ours
    assert "Traceback" not in beside.said
    for job in ("held", "beside"):
        assert job in launches.ask("jobs")
        assert "restart mode, stopped" in launches.ask("status", job)


#: A script that is slow to leave, and one that never does.
LEAVES = """
import os, signal, time
def leave(*_):
    time.sleep(2)
    open(os.environ["SAVED"], "w").write("saved")
    os._exit(0)
signal.signal(signal.SIGTERM, {handler})
print("trains", flush=True)
while True:
    time.sleep(0.05)
"""


def test_stop_of_a_job_in_restart_mode_lets_its_workers_save_and_ends_those_that_do_not_at_once(
    launches: Launches,
) -> None:
    saved = launches.cluster.folder / "saved"
    for job, handler, options in (("saves", "leave", ()), ("deaf", "signal.SIG_IGN", ("--now",))):
        script = launches.script(LEAVES.format(handler=handler), f"{job}.py")
        command = ("--job", job, "--mode", "restart", "--devices", "1", script)
        # Another path than ours: processes of their own, which the agent knows by their environment.
        run = launches.run("a", *command, SAVED=str(saved), PYTHONPATH=f"{ROOT}{os.pathsep}")
        until(lambda run=run: "trains" in run.said, said(run))
        orphans = workers(run)
        assert f"job {job} is stopped: stopped by " in launches.ask("stop", *options, job)
        assert run.wait() == 0, run.said
        until(lambda orphans=orphans: not living(orphans))
        assert saved.read_text() == "saved"
    events = [event for event in launches.cluster.events("stopped") if event["job"] in ("saves", "deaf")]
    assert len(events) == 2
