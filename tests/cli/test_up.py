"""`elasticd up` and `elasticd doctor` as a new user meets them: real processes, and an honest list."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elasticd.cli.app import elasticd
from tests.cli.support import call, refused

DEADLINE = 120.0


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICD_")}
    return kept | {"XDG_STATE_HOME": str(place / "state")}


def test_up_serves_says_what_to_do_keeps_its_data_and_leaves_nothing(tmp_path: Path) -> None:
    configuration = tmp_path / "mine.toml"
    configuration.write_text(
        f'[coordinator]\nport = 0\n[etcd]\nendpoints = ["nowhere:1"]\n[agent]\nsocket = "{tmp_path}/a.sock"\n'
    )
    options = ("--config", str(configuration), "--devices", "2", "--memory", "1 GiB")
    epochs: list[int] = []
    while len(epochs) < 2:
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticd", "up", *options],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = ""
            while "Ctrl-C" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            children = psutil.Process(process.pid).children(recursive=True)
            found = re.search(r"ELASTICD_CONFIG=(\S+)", said)
            assert found is not None
            assert f"elasticd run --job my-job --socket {tmp_path}/a.sock --devices 2 train.py" in said
            deadline = time.monotonic() + DEADLINE
            while "1.0 GiB" not in (shown := call("status", "--config", found[1]).output):
                assert time.monotonic() < deadline, shown
                time.sleep(0.1)
            if not epochs:
                checked = call("doctor", "--config", found[1])
                assert checked.exit_code == 0, checked.output
                assert re.search(r"leads at .*; nodes: 1,\s+jobs: 0", checked.output)
            epochs += [int(number) for number in re.findall(r"epoch (\d+)", shown)]
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
            process.wait()
        _, alive = psutil.wait_procs(children, timeout=DEADLINE)
        assert alive == []
    assert epochs[0] < epochs[1], "etcd's data was not kept"


def test_doctor_names_what_is_missing_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        f'[etcd]\nendpoints = ["127.0.0.1:1"]\n[agent]\nsocket = "{tmp_path}/no.sock"\n'
    )
    done = call("doctor", "--config", str(tmp_path / "e.toml"))
    assert done.exit_code == 1
    assert "none answers at 127.0.0.1:1" in done.output
    assert "elasticd up" in done.output
    assert "start one: elasticd-agent" in done.output
    assert "Traceback" not in done.output


def test_up_in_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "name another folder with --folder" in refused("up", "--folder", str(tmp_path / "file" / "x"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(shell: str) -> None:
    done = call("completion", shell)
    assert done.exit_code == 0
    assert "_ELASTICD_COMPLETE" in done.output
    assert len(elasticd.commands) >= 15
