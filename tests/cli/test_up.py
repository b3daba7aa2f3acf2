"""`elasticd up` and `elasticd doctor` as a new user meets them: real processes, and an honest list."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import httpx2
import psutil
import pytest

from elasticd.cli.app import elasticd
from elasticd.cli.up import Restarts
from elasticd.config.tree import ConfigError
from elasticd.local_cluster import alone, announced, running, settings, taken
from elasticd.store.state_file import default_folder
from elasticd.system import process_mark
from elasticd.system.child_processes import ProcessError, Processes
from elasticd.system.torchrun_launcher import Launch
from elasticd.testing.waiting import until
from tests import forkserver, nursery
from tests.cli.support import call, refused

DEADLINE = 120.0


def environment(place: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICD_")}
    ours = {"PYTHONPATH": str(forkserver.ROOT), "PYTHONUNBUFFERED": "1"}
    return kept | ours | {"XDG_STATE_HOME": str(place / "state")}


def test_up_serves_says_what_to_do_keeps_its_data_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands find it without an option or a variable."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").touch()
    configuration = tmp_path / "mine.toml"
    configuration.write_text(
        "[coordinator]\nport = 0\n[dashboard]\nport = 0\n[ chaos ]\nenabled = false\n"
        f'[etcd]\nendpoints = ["nowhere:1"]\n[agent]\nsocket = "{tmp_path}/a.sock"\n'
    )
    options = ("--config", str(configuration), "--devices", "2", "--memory", "1 GiB")
    epochs: list[int] = []
    launched: list[Launch] = []
    while len(epochs) < 2:
        chaos = ["--chaos"] if epochs else []
        printed = tmp_path / f"printed-{len(epochs)}"
        process = forkserver.start(
            *("elasticd.__main__", "up", *options, *chaos), environment=environment(tmp_path), output=printed
        )
        try:

            def words() -> str:
                so_far = printed.read_text() if printed.exists() else ""  # noqa: B023
                assert process.poll() is None, so_far  # noqa: B023
                return so_far if "Ctrl-C" in so_far else ""

            said = until(words)
            stages = ("starting etcd, ", "etcd answers (", "the coordinator leads (", "the agent serves (")
            assert [line.startswith(stage) for line, stage in zip(said.splitlines(), stages, strict=False)] == (
                [True] * len(stages)
            )
            children = psutil.Process(process.pid).children(recursive=True)
            assert "elasticd run --job my-job --devices 2 train.py" in said
            pages = re.search(r"^dashboard at (http://127\.0\.0\.1:\d+)$", said, re.MULTILINE)
            assert pages is not None, said
            assert httpx2.get(f"{pages[1]}/api/viewer", trust_env=False).json()["role"] == "operator"
            deadline = time.monotonic() + DEADLINE
            while "1 GiB" not in (shown := call("status").output):
                assert time.monotonic() < deadline, shown
                time.sleep(0.1)
            if not epochs:
                checked = call("doctor")
                assert checked.exit_code == 0, checked.output
                assert "of the 'elasticd up' that runs here" in " ".join(checked.output.split())
                assert "another 'elasticd up' runs in" in refused("up", *options)
                monkeypatch.setattr("elasticd.system.torchrun_launcher.launch", launched.append)
                call("run", "--job", "j", "--devices", "2", str(tmp_path / "train.py"))
                assert [what.socket for what in launched] == [f"{tmp_path}/a.sock"]
                assert re.search(r"leads at .*; nodes: 1,\s+jobs: 0", checked.output)
            device = json.loads(call("status", "--json").output)["nodes"][0]["devices"][0]["name"]
            harmed = call("chaos", "slow", device, "2")
            if chaos:
                assert f"{device} now takes 2 times as long" in harmed.output
            else:
                assert "or start 'elasticd up --chaos'" in harmed.output
            epochs += [int(number) for number in re.findall(r"epoch (\d+)", shown)]
            if chaos:
                kill_and_wait_for_the_next(children, "coordinator", epochs[-1])
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
            process.wait()
        _, alive = psutil.wait_procs(children, timeout=DEADLINE)
        assert alive == []
        assert running() == []
    assert epochs[0] < epochs[1], "etcd's data was not kept"


def kill_and_wait_for_the_next(children: list[psutil.Process], word: str, epoch: int) -> None:
    """Kills a program of 'elasticd up', which starts it again: a later leader serves."""
    ours = [child for child in children if child.name() != nursery.NAME]
    (victim,) = [child for child in ours if os.readlink(f"/proc/{child.pid}/fd/1").endswith(f"/{word}.log")]
    victim.kill()
    deadline = time.monotonic() + DEADLINE
    while not any(int(number) > epoch for number in re.findall(r"epoch (\d+)", call("status").output)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_program_that_ends_again_and_again_is_not_started_any_more(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        restarts = Restarts(processes)
        child = processes.start("agent", ["/bin/sh", "-c", "echo no key; exit 3"])
        for _ in range(3):
            child.process.wait()
            child = restarts.running(child)
        child.process.wait()
        with pytest.raises(ProcessError, match=r"agent ended 4 times in 60 s.*\n(no key\n){3}no key"):
            restarts.running(child)


def test_of_two_that_run_one_must_be_named_and_one_that_was_killed_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configurations = [tmp_path / f"{name}.toml" for name in ("one", "two")]
    for file in configurations:
        file.write_text(f'[cluster]\nname = "{file.stem}"\n')
    monkeypatch.delenv("ELASTICD_CONFIG", raising=False)
    assert settings(None).cluster.name == "default"
    with announced(configurations[0]):
        assert settings(None).cluster.name == "one"
        links = default_folder() / "up"
        (links / "99-1").symlink_to(configurations[1])  # of a process that is no more
        assert settings(None).cluster.name == "one"
        (links / str(process_mark.mark(os.getppid()))).symlink_to(configurations[1])
        with pytest.raises(ConfigError, match=r"several 'elasticd up' run .*\n.*one\.toml\n.*two\.toml"):
            settings(None)
        assert settings(str(configurations[1])).cluster.name == "two"
        monkeypatch.setenv("ELASTICD_CONFIG", str(configurations[1]))
        assert settings(None).cluster.name == "two"


def test_a_folder_is_held_by_one_and_a_port_that_is_listened_at_is_taken(tmp_path: Path) -> None:
    with alone(tmp_path) as first, alone(tmp_path) as second:
        assert (first, second) == (True, False)
    with alone(tmp_path) as again, socket.create_server(("127.0.0.1", 0)) as server:
        assert again
        assert "in use" in taken("127.0.0.1", server.getsockname()[1])
    assert taken("127.0.0.1", 0) == ""


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


def test_doctor_gives_programs_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]  # looked for in seconds otherwise
    (tmp_path / "e.toml").write_text("[etcd]\nendpoints = ['127.0.0.1:1']\n")
    done = call("doctor", "--json", "--config", str(tmp_path / "e.toml"))
    assert done.exit_code == 1
    found = {finding["what"]: finding for finding in json.loads(done.output)}
    assert found["etcd"]["verdict"] == "missing"
    assert "elasticd up" in found["etcd"]["remedy"]


def test_up_in_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "name another folder with --folder" in refused("up", "--folder", str(tmp_path / "file" / "x"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(shell: str) -> None:
    done = call("completion", shell)
    assert done.exit_code == 0
    assert "_ELASTICD_COMPLETE" in done.output
    assert len(elasticd.commands) >= 15
