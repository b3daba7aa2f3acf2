"""`elasticd-agent` as a command: it serves, it ends cleanly, and bad input ends in one message."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd.records import Keys
from elasticd.store.protocol import Identity
from elasticd.store.state_file import StateFile
from elasticd.testing.waiting import until
from tests import sizes
from tests.agent.support import DEADLINE, Trainer
from tests.etcds import SharedEtcd

COMMAND = [sys.executable, "-m", "elasticd_agent"]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ELASTICD_")}


def refused(*options: str) -> str:
    """What the command says on its way to a non-zero end."""
    done = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=300, env=environment(), check=False
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


def test_etcd_that_is_not_there_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers, nobody else takes it
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        said = refused("--etcd", endpoint, "--socket", str(tmp_path / "a.sock"), "--node", "n0")
    assert f"no etcd can be used at {endpoint}" in said
    assert "start it, or name yours with --etcd" in said
    assert not (tmp_path / "a.sock").exists()


def test_unknown_key_in_the_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("[agent]\ndevises = 2\n")
    said = refused("--config", str(tmp_path / "e.toml"))
    assert "[agent] has no key 'devises' (= 2): did you mean 'devices'?" in said
    assert len(said.splitlines()) == 1


def test_wrong_option_is_named() -> None:
    assert "No such option" in refused("--nod", "a")
    assert "node 'a/b' cannot be used" in refused("--node", "a/b")


def test_etcd_that_was_set_up_anew_under_an_old_name_is_refused_with_the_file_to_delete(
    shared_etcd: SharedEtcd, tmp_path: Path
) -> None:
    with shared_etcd.store() as store:
        known = store.identity()
    cluster = shared_etcd.cluster("agent")
    (tmp_path / "e.toml").write_text(f'[cluster]\nname = "{cluster}"\n[agent]\nstate = "{tmp_path}"\n')
    memory = StateFile(str(tmp_path), cluster, "agent", "n0")
    memory.note(identity=Identity(cluster_id=known.cluster_id, revision=known.revision + 1000))
    options = ("--config", str(tmp_path / "e.toml"), "--node", "n0", "--etcd", shared_etcd.endpoint)
    said = refused(*options, "--socket", str(tmp_path / "a.sock"), "--devices", "1", "--memory", "1 MiB")
    assert f"revision {known.revision + 1000} was seen before" in said
    assert f"{memory.path}: if this etcd is the right one" in said
    assert "delete that file, or use another cluster name" in said
    assert len(said.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", sizes.beside([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_signal_ends_the_agent_cleanly_and_spares_its_workers(
    shared_etcd: SharedEtcd, tmp_path: Path, number: signal.Signals
) -> None:
    path, cluster = str(tmp_path / "a.sock"), shared_etcd.cluster("agent")
    options = ["--node", "n0", "--socket", path, "--devices", "2", "--memory", "1 MiB"]
    if number == signal.SIGINT:
        options += ["--address", "127.0.0.1"]  # the other waits for a leader, whose route would say so
    process = subprocess.Popen(
        [*COMMAND, *options, "--etcd", shared_etcd.endpoint, "--cluster", cluster],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    root = Keys(cluster=cluster).root
    try:
        with shared_etcd.store() as store:
            trainer = Trainer(path)
            assert trainer.welcomed(1).device == "n0/1"
            until(lambda: len(store.snapshot(root).items) == 2)
            process.send_signal(signal.SIGHUP)
            process.send_signal(number)
            _, said = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, said
            assert "Traceback" not in said
            assert "read anew: nothing new" in said
            assert "has changed too" not in said
            assert trainer.hear() is None
            assert store.snapshot(root).items == ()
            assert not Path(path).exists()
    finally:
        process.kill()
        process.wait()
