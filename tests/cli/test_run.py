"""`elasticd run`: what it starts, and what it says to those who call it wrongly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from elasticd.cli.app import elasticd
from elasticd.launching import environment
from elasticd.packets import SLOT_VARIABLE
from tests import forkserver

DEADLINE = 60.0
COMMAND = (sys.executable, "-m", "elasticd", "run", "--job", "j", "--devices", "2")


def test_each_torchrun_sees_one_gpu_of_those_that_we_may_use() -> None:
    assert environment(1, {"CUDA_VISIBLE_DEVICES": "4,6", "X": "1"}) == {
        "CUDA_VISIBLE_DEVICES": "6",
        "X": "1",
        SLOT_VARIABLE: "1",
    }
    assert environment(3, {})["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nnodes", "3:2"), "the least must be between 1 and the most"),
        (("--nnodes", "x"), "must be a number or MIN:MAX"),
        ((), "is not there: name the training script"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(options: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(elasticd, ["run", "--job", "j", "--devices", "2", *options, "missing.py"])
    assert result.exit_code
    assert said in result.output


def test_without_an_agent_all_torchruns_end_and_nothing_is_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(1)\n")
    printed, running = tmp_path / "printed", {**os.environ, "PYTHONPATH": str(forkserver.ROOT)}
    command = (*COMMAND[3:], "--socket", str(tmp_path / "none.sock"), str(script))
    done = forkserver.start("elasticd", *command, environment=running, output=printed)
    try:
        code = done.wait(2 * DEADLINE)
    finally:
        done.terminate()  # it ends its torchruns
        done.wait(DEADLINE)
    assert code == 1, printed.read_text()
    assert "no agent listens at" in printed.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_torchrun_outlives_it(number: signal.Signals, tmp_path: Path) -> None:
    """They wait for an agent when the signal comes."""
    script = tmp_path / "train.py"
    script.write_text("")
    process = subprocess.Popen(
        [*COMMAND, "--socket", str(tmp_path / "none.sock"), str(script)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + DEADLINE
        ours = psutil.Process(process.pid)
        while len(tree := ours.children(recursive=True)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, number)
        process.wait(DEADLINE)
        _, left = psutil.wait_procs(tree, DEADLINE)
        assert not left
    finally:
        process.kill()
        process.wait()
