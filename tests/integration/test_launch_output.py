"""What `elasticd run` tells its user, and what becomes of its workers' output, devices and processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from elasticd.cli.app import elasticd
from elasticd.client import ApiClient, CannotReach
from elasticd.testing.waiting import until
from tests import forkserver
from tests.integration.launches import Launched, Launches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

#: A small job whose workers start a child each, and say its number and what they train.
SCRIPT = """
import os, subprocess, sys, time
import torch
import elasticd
from elasticd.models import Decoder, DecoderConfig, next_token_loss

class Text:
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        ids = torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(index))
        return {"inputs": ids[:-1], "targets": ids[1:]}

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stdout=subprocess.DEVNULL)
print("worker", os.getpid(), "child", child.pid)
with torch.device("meta"):
    model = Decoder(DecoderConfig(vocabulary=40, width=32, layers=2, heads=4, kv_heads=2, hidden=44)).describe()
job = elasticd.Job(
    model=model, loss=next_token_loss, dataset=Text(), global_batch=8, micro_batch=2,
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    checkpointing=elasticd.CheckpointingOptions(folder=sys.argv[1], every=1000),
)
for step in job.steps(1_000_000):
    print(f"step {step.index}")
    time.sleep(0.02)
"""

#: The same without children: those of a worker that ends by itself live on.
CHILDLESS = re.sub(r"child = .*\nprint.*\n", "", SCRIPT).replace("every=1000", "every=5")


@pytest.fixture(scope="module")
def launches() -> Iterator[Launches]:
    with Launches({"alpha": 3}) as launches:
        launches.script(SCRIPT)
        yield launches


@pytest.fixture(autouse=True)
def _end_of_runs(launches: Launches) -> Iterator[None]:
    yield
    launches.end()


def start(launches: Launches, job: str, *options: str) -> Launched:
    """`elasticd run` with the script, as a job that keeps its checkpoints under its name."""
    command = (
        "--job",
        job,
        *options,
        launches.cluster.folder / "train.py",
        launches.cluster.folder / f"ck-{job}",
    )
    return launches.run("alpha", *command)


def trains(run: Launched, *devices: str, seconds: float = 120.0) -> None:
    """Waits until each of these workers has said a further step."""

    def last(device: str) -> int:
        return max(map(int, re.findall(rf"^\[{device}\] step (\d+)$", run.said, re.MULTILINE)), default=-1)

    before = {device: last(device) for device in devices}
    until(lambda: all(last(device) > before[device] for device in devices), lambda: run.said, seconds=seconds)


def pids(run: Launched, device: str) -> tuple[int, int]:
    """The newest worker of a device, and its child."""
    found = re.findall(rf"^\[{device}\] worker (\d+) child (\d+)$", run.said, re.MULTILINE)
    return int(found[-1][0]), int(found[-1][1])


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_user_hears_of_start_fault_and_end_in_a_line_each_and_a_dead_workers_child_is_ended(
    launches: Launches, tmp_path: Path
) -> None:
    run = start(launches, "told", "--devices", "2", "--log-dir", str(tmp_path))
    trains(run, "alpha/0", "alpha/1")
    assert any(line.startswith("elasticd: job told on alpha/0, alpha/1: plan 1: ") for line in run.ours)
    assert len(re.findall(r"elasticd: no checkpoint in \S+ck-told: starts at step 0", run.said)) == 1

    worker, child = pids(run, "alpha/1")
    others = pids(run, "alpha/0")
    os.kill(worker, signal.SIGKILL)
    until(lambda: gone(child), lambda: run.said)
    until(lambda: any(f"worker alpha/1 (pid {worker}) died" in line for line in run.ours), lambda: run.said)
    assert re.search(
        r"elasticd: worker alpha/1 .* died.*; plan \d+ without alpha/1 goes on from step \d+", run.said
    )
    until(lambda: pids(run, "alpha/1")[0] != worker, lambda: run.said)
    assert not gone(others[1]), "it is of a worker that lives"
    assert {path.name for path in (tmp_path / "told").iterdir()} >= {"alpha-1.0.log", "alpha-1.1.log"}

    with ApiClient(launches.cluster.coordinator.url) as api:
        api.stop("told", 600.0, "alice")
    assert run.wait() == 0, run.said
    assert "elasticd: job told stopped by alice" in run.said
    assert not any(noise in run.said for noise in ("Traceback", "failed (exit", "SignalException")), run.said
    until(lambda: all(gone(pid) for pid in (*others, *pids(run, "alpha/1"))), lambda: run.said)

    again = start(launches, "told", "--devices", "1")
    until(lambda: "elasticd: continues from step " in again.said, lambda: again.said)
    again.process.send_signal(signal.SIGINT)
    assert again.wait() == 128 + signal.SIGINT, again.said
    assert not any(noise in again.said for noise in ("Traceback", "failed (exit")), again.said


def test_second_job_takes_free_devices_and_is_told_what_to_do_where_there_are_too_few(
    launches: Launches,
) -> None:
    first = start(launches, "first", "--device-ids", "0,2")
    trains(first, "alpha/0", "alpha/2")
    second = start(launches, "second", "--devices", "1", "--label")
    trains(second, "alpha/1")
    third = start(launches, "third", "--devices", "2")
    assert third.wait() == 1
    assert third.said.count("\n") == 1
    assert (
        "2 devices are asked for, and 0 are free: used are alpha/0 by job first, alpha/1 by job second"
        in third.said
    )
    for run in (first, second):
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait() == 128 + signal.SIGUSR1, run.said


def test_jobs_that_are_started_at_once_take_devices_of_their_own(launches: Launches) -> None:
    script = launches.script(
        "import os, time\nprint('slot', os.environ['ELASTICD_SLOT'])\ntime.sleep(3600)\n", "at.py"
    )
    runs = [launches.run("alpha", "--job", f"at{job}", "--devices", "1", script) for job in range(3)]

    def devices() -> list[str]:
        return sorted(line[-1] for run in runs for line in run.said.splitlines() if line.startswith("slot "))

    until(lambda: len(devices()) == 3, lambda: "\n".join(run.said for run in runs))
    assert devices() == ["0", "1", "2"]
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM, run.said


def test_output_of_a_worker_is_read_over_the_coordinator_and_lives_on_after_it(launches: Launches) -> None:
    run = start(launches, "read", "--devices", "2")
    trains(run, "alpha/0", "alpha/1")
    url = launches.cluster.coordinator.url
    with ApiClient(url) as api:
        part = api.output("alpha/1", "", -10_000)
        assert (part.job, part.device, part.begin) == ("read", "alpha/1", 0)
        assert part.text.splitlines()[0] == "worker {} child {}".format(*pids(run, "alpha/1"))
        more = until(lambda: (found := api.output("alpha/1", "read", part.end)).text and found)
        assert more.begin == part.end
        for device, job, said in (
            ("alpha/1", "other", "is kept"),
            ("beta/0", "", "node beta has no agent here"),
        ):
            with pytest.raises(CannotReach, match=said):
                api.output(device, job, 0)
    run.process.kill()
    run.process.wait()
    until(lambda: all(gone(pid) for device in ("alpha/0", "alpha/1") for pid in pids(run, device)))
    shown = CliRunner().invoke(
        elasticd, ["logs", "--coordinator", url, "--worker", "alpha/1", "--last", "3", "read"]
    )
    assert shown.exit_code == 0, shown.output
    assert len(shown.output.splitlines()) == 3
    assert "step" in shown.output


def last_line(run: Launched) -> str:
    """The last line that was printed."""
    return run.said.splitlines()[-1]


LEFT = "stopped: its workers left before the last step: the script left the loop after 6 of 40 steps"


@pytest.mark.parametrize(
    ("name", "devices", "body", "words"),
    [
        ("break", 1, "if step.index == 5: break", LEFT),
        pytest.param("exit", 2, "if step.index == 5: sys.exit(0)", LEFT, marks=pytest.mark.full),
        pytest.param("whole", 1, "pass", "finished after 40 steps", marks=pytest.mark.full),
        pytest.param("both", 2, "pass", "finished after 40 steps", marks=pytest.mark.full),
    ],
)
def test_last_line_says_how_the_job_ended_and_after_how_many_steps(
    name: str, devices: int, body: str, words: str, launches: Launches
) -> None:
    text = CHILDLESS.replace("1_000_000", "40").replace("time.sleep(0.02)", body)
    folder = launches.cluster.folder
    launches.script(f"{text}\nprint('the script is through')\n", f"{name}.py")
    command = ("--job", name, "--devices", str(devices), folder / f"{name}.py", folder / f"ck-{name}")
    # An interpreter of its own: one that is forked of the tests' does not wait for its threads at its end.
    run = launches.run("alpha", *command, PYTHONPATH=f"{folder}:{forkserver.ROOT}")
    assert run.wait() == 0, run.said
    assert last_line(run).startswith(f"elasticd: job {name} {words}"), run.said
    assert run.said.count(words) == 1
    reason = launches.job(name)["reason"]
    assert words.removeprefix("stopped: ") in reason or launches.job(name)["phase"] == "done"


def test_exception_of_the_loops_body_is_told_by_the_launcher_once(launches: Launches) -> None:
    body = "assert step.index < 5, 'too far'"
    text = CHILDLESS.replace("time.sleep(0.02)", body)
    launches.script(text, "raises.py")
    folder = launches.cluster.folder
    run = launches.run("alpha", "--job", "raises", "--devices", "2", folder / "raises.py", folder / "ck-raises")
    assert run.wait() == 1, run.said
    assert "elasticd: the script's code raised AssertionError: too far (in step 5, on alpha/" in run.said
    words = "elasticd: job raises stopped: the script's code raised AssertionError: too far (in step "
    assert last_line(run).startswith(words), run.said
    assert "elasticd: elasticd" not in run.said
    assert "] elasticd: the script's code raised" not in run.said
    assert "lost the other ranks (its code" not in run.said


def test_model_that_is_refused_is_one_line_whatever_number_of_workers_it_has(launches: Launches) -> None:
    text = (
        "import elasticd\nfrom torch import nn\n"
        "elasticd.Model(embed=nn.Embedding(4, 4), blocks=[nn.BatchNorm1d(4)], head=nn.Linear(4, 4))\n"
    )
    run = launches.run("alpha", "--job", "norm", "--devices", "2", launches.script(text, "norm.py"))
    assert run.wait() == 1
    assert run.said.count("\n") == 1, run.said
    assert "BatchNorm1d" in run.said


#: A worker that is long in coming to its Job.
WAITS = "import time\nprint('waits', flush=True)\ntime.sleep(3600)\n"
#: The second of two is, the first one makes its Job.
ASSEMBLES = f"import os\nif os.environ['ELASTICD_SLOT'] == '1':\n    exec({WAITS!r})\n{CHILDLESS}"


@pytest.mark.parametrize(
    ("moment", "script", "options"),
    [("gathers", WAITS, ("--nnodes", "2")), ("imports", WAITS, ()), ("assembles", ASSEMBLES, ())],
)
def test_job_that_ctrl_c_ends_before_it_begins_stands_in_the_list(
    moment: str, script: str, options: tuple[str, ...], launches: Launches
) -> None:
    folder = launches.cluster.folder
    command = (*options, "--devices", "2", launches.script(script, f"{moment}.py"), folder / f"ck-{moment}")
    run = launches.run("alpha", "--job", moment, *command)
    if options:
        until(lambda: launches.job(moment), lambda: run.said)
    else:
        until(lambda: "waits" in run.said, lambda: run.said)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT, run.said
    assert last_line(run).startswith(f"elasticd: job {moment} stopped by SIGINT before its first step"), (
        run.said
    )
    assert "Traceback" not in run.said
    assert launches.job(moment)["phase"] == "stopped"
    assert "stopped by SIGINT" in launches.ask("jobs")


@pytest.mark.full
def test_second_ctrl_c_ends_all_at_once(launches: Launches) -> None:
    run = start(launches, "hard", "--devices", "2")
    trains(run, "alpha/0", "alpha/1")
    left = [pid for device in ("alpha/0", "alpha/1") for pid in pids(run, device)]
    for worker in left[::2]:
        os.kill(worker, signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    until(lambda: "the workers save and leave" in run.said)

    def ended() -> bool:
        run.process.send_signal(signal.SIGINT)
        return run.process.poll() is not None

    until(ended, lambda: run.said)
    assert run.wait() == 128 + signal.SIGINT
    until(lambda: all(map(gone, left)))
