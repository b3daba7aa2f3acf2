"""`elasticd run`: what it starts, and what it says to those who call it wrongly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from elasticd.cli.app import elasticd
from elasticd.system import torchrun_launcher
from elasticd.system.torchrun_launcher import GPUS_VARIABLE, THREADS_VARIABLE, Launch, environment, visible
from elasticd.wire import unix_socket
from elasticd.wire.unix_socket import SLOT_VARIABLE
from tests import forkserver, nursery, sizes
from tests.liveness import living

DEADLINE = 60.0
COMMAND = ("run", "--job", "j", "--devices", "2")


def job(gpus: Sequence[str], devices: int = 2) -> Launch:
    return Launch(
        job="j",
        least=1,
        most=1,
        devices=devices,
        gpus=tuple(gpus),
        socket=None,
        max_restarts=0,
        command=("train.py",),
    )


def test_each_torchrun_has_one_gpu_and_is_the_device_of_the_node_that_this_gpu_is() -> None:
    found = environment(job("46"), 1, {GPUS_VARIABLE: "4,6", "X": "1"})
    assert found == {
        "X": "1",
        GPUS_VARIABLE: "6",
        SLOT_VARIABLE: "6",
        THREADS_VARIABLE: "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    assert environment(job("46"), 1, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    named = ("GPU-aa", "GPU-bb")
    assert [environment(job(named), index, {})[SLOT_VARIABLE] for index in range(2)] == ["0", "1"]
    assert environment(job(named), 1, {})[GPUS_VARIABLE] == "GPU-bb"


def test_what_the_user_hid_stays_hidden_and_nothing_else_is() -> None:
    """A worker that finds no GPU where one should be says so: we must not hide them for it."""
    for ours in ({}, {GPUS_VARIABLE: ""}, {GPUS_VARIABLE: "-1"}):
        assert environment(job(()), 1, ours).get(GPUS_VARIABLE) == ours.get(GPUS_VARIABLE)


def test_several_workers_have_a_thread_each_unless_the_user_chose_a_number_or_there_is_one() -> None:
    assert environment(job(()), 0, {})[THREADS_VARIABLE] == "1"
    assert environment(job(()), 0, {THREADS_VARIABLE: "7"})[THREADS_VARIABLE] == "7"
    assert THREADS_VARIABLE not in environment(job((), devices=1), 0, {})


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("4, 6", ("4", "6")),
        ("4,-1,6", ("4",)),
        ("GPU-a,MIG-b", ("GPU-a", "MIG-b")),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(said: str | None, gpus: tuple[str, ...] | None) -> None:
    assert visible({} if said is None else {GPUS_VARIABLE: said}) == gpus


def test_more_workers_than_gpus_are_refused_unless_the_user_names_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Launch] = []
    monkeypatch.setattr("elasticd.system.torchrun_launcher.launch", launched.append)
    monkeypatch.setattr("elasticd.cli.run._counted", lambda: 2)
    (tmp_path / "train.py").write_text("")
    command = ["run", "--job", "j", "--devices", "3", str(tmp_path / "train.py")]
    result = CliRunner(env={GPUS_VARIABLE: "4,6"}).invoke(elasticd, command)
    assert result.exit_code == 1
    assert "--devices 3 needs as many GPUs, and CUDA_VISIBLE_DEVICES=4,6 names 2" in result.output
    result = CliRunner(env={GPUS_VARIABLE: None}).invoke(elasticd, command)
    assert result.exit_code == 1
    assert (
        "needs as many GPUs, and this node has 2: ask for 2 at most, or set ELASTICD_DEVICE=cpu"
        in result.output
    )
    for asked in ("cpu", "cuda:0"):
        CliRunner(env={GPUS_VARIABLE: None, "ELASTICD_DEVICE": asked}).invoke(elasticd, command)
    command[4] = "2"
    CliRunner(env={GPUS_VARIABLE: None}).invoke(elasticd, command)
    assert [(what.devices, what.gpus) for what in launched] == [(3, ()), (3, ()), (2, ("0", "1"))]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nnodes", "3:2"), "the least must be between 1 and the most"),
        (("--nnodes", "x"), "must be a number or MIN:MAX"),
        ((), "is not there: name the training script"),
        (("-m",), "there is no module missing.py here: name it as with python -m"),
        (("--mode", "other"), "'other' is not one of 'auto', 'live', 'restart'"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(options: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(elasticd, ["run", "--job", "j", "--devices", "2", *options, "missing.py"])
    assert result.exit_code
    assert said in result.output


def test_a_module_goes_on_to_torchrun_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Launch] = []
    monkeypatch.setattr("elasticd.system.torchrun_launcher.launch", launched.append)
    command = ["run", "--job", "j", "--devices", "1", "-m", "tests.nothing", "--lr", "1", "-m"]
    CliRunner(env={"ELASTICD_DEVICE": "cpu"}).invoke(elasticd, command)
    assert [(what.module, what.command) for what in launched] == [(True, ("tests.nothing", "--lr", "1", "-m"))]


def test_without_an_agent_all_torchruns_end_and_nothing_is_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(1)\n")
    printed, running = tmp_path / "printed", {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
    command = (*COMMAND, "--socket", str(tmp_path / "none.sock"), str(script))
    done = forkserver.start("elasticd.__main__", *command, environment=running, output=printed)
    try:
        code = done.wait(2 * DEADLINE)
    finally:
        done.terminate()  # it ends its torchruns
        done.wait(DEADLINE)
    assert code == 1, printed.read_text()
    assert "no agent listens at" in printed.read_text()


# test_launch_output kills a command that trains: its workers end.
@pytest.mark.parametrize("number", sizes.beside([signal.SIGINT], [signal.SIGINT, signal.SIGKILL]))
def test_no_torchrun_outlives_it(number: signal.Signals, tmp_path: Path) -> None:
    """They wait for their agent's answer when the signal comes."""
    script = tmp_path / "train.py"
    script.write_text("")
    silent = unix_socket.listen(str(tmp_path / "none.sock"))
    command = (*COMMAND, "--socket", str(tmp_path / "none.sock"), str(script))
    running = {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
    process = forkserver.start("elasticd.__main__", *command, environment=running, output=tmp_path / "printed")
    try:
        deadline = time.monotonic() + DEADLINE
        ours = psutil.Process(process.pid)
        while len(tree := living(ours.children(recursive=True), unnamed=nursery.NAME)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, number)
        process.wait(DEADLINE)
        _, left = psutil.wait_procs(tree, DEADLINE)
        assert not left
    finally:
        process.kill()
        process.wait()
        silent.close()


def waited(tmp_path: Path, *commands: str) -> None:
    """Waits for shells in the place of torchruns, the devices of which are 0, 1, ..."""
    processes = [subprocess.Popen(["sh", "-c", command]) for command in commands]
    torchruns = [
        torchrun_launcher._Torchrun(process=process, outcome=tmp_path / "none", words=f"device {index}")
        for index, process in enumerate(processes)
    ]
    torchrun_launcher._wait(torchruns, [])


def test_others_go_on_only_where_some_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (tmp_path / "go").touch()

    monkeypatch.setattr(torchrun_launcher, "_say", say)
    monkeypatch.setattr(torchrun_launcher, "ALIKE_SECONDS", 2 * DEADLINE)
    waited(tmp_path, "exit 2", "exit 2")
    assert said == []
    monkeypatch.setattr(torchrun_launcher, "ALIKE_SECONDS", 0.0)
    waited(tmp_path, f"until [ -e {tmp_path}/go ]; do sleep 0.05; done", "exit 2")
    assert said == ["device 1 is out, torchrun ended with code 2: the others go on"]


def test_an_option_that_there_is_not_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(elasticd, ["run", "--nproc-per-node", "2", "train.py"])
    assert "No such option '--nproc-per-node" in result.output


def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[str, str]:
    """The name that a job has by these options, and what the command says."""
    launched: list[Launch] = []
    monkeypatch.setattr("elasticd.system.torchrun_launcher.launch", launched.append)
    (script := tmp_path / "my train.py").write_text("")
    result = CliRunner().invoke(elasticd, ["run", "--devices", "1", *options, str(script)])
    return launched[0].job if launched else "", result.output


def test_job_without_a_name_gets_one_of_its_script_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, said = named(tmp_path, monkeypatch)
    assert re.fullmatch(r"my-train-\d{4}-\d{6}", name)
    assert f"elasticd: job {name}" in said
    assert named(tmp_path, monkeypatch, "--job", "j")[0] == "j"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--job", ""), "--job is empty: name the job, or leave the option out"),
        (("--job", "a b/c"), "--job 'a b/c' cannot be used: a name is made of letters, digits"),
        (("--job", "none"), "choose another"),
        (("--nnodes", "2"), "needs a name, the same on each: --job NAME"),
    ],
)
def test_names_that_cannot_be_are_refused(
    options: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, said = named(tmp_path, monkeypatch, *options)
    assert name == ""
    assert words in " ".join(said.split())
