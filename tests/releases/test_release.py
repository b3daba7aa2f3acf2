"""The release has one place, and both programs and every hello say it."""

from __future__ import annotations

import os
import socket
import threading
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from elasticd_agent.command import command
from torch.distributed.elastic.rendezvous import RendezvousParameters

import elasticd
from elasticd.cli.app import elasticd as cli
from elasticd.codec.message import encode
from elasticd.machines.agent import machine
from elasticd.machines.agent.state import AgentState, AgentTell, LinkUp
from elasticd.rendezvous.agent_requests import AgentRequests
from elasticd.rendezvous.live_mode import LiveHandler, RendezvousOver
from elasticd.runtime.accelerator import CPU
from elasticd.runtime.api import hello as first_message
from elasticd.runtime.api import watch
from elasticd.version import __version__
from elasticd.wire import unix_socket
from elasticd.wire.coordinator import AgentHello
from elasticd.wire.rendezvous import Attend, Attending, Join
from elasticd.wire.worker import Closed, from_worker
from tests.agent.support import spec
from tests.machines.cast import node_record
from tests.releases import kept

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_release_is_in_one_place() -> None:
    assert elasticd.__version__ == __version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    made = "Unreleased" if ".dev" in __version__ else __version__
    assert [f"\n## {name}\n" in changes for name in (made, *kept.RELEASED)] == [True] * (1 + len(kept.RELEASED))
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"] == {
        "path": "elasticd/version.py"
    }


def test_both_programs_print_their_name_and_release() -> None:
    for program, name in ((cli, "elasticd"), (command, "elasticd-agent")):
        found = CliRunner().invoke(program, ["--version"])
        assert (found.exit_code, found.output) == (0, f"{name}, version {__version__}\n")


def test_every_hello_says_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "j")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(unix_socket.TORCHRUN_VARIABLE, "t")
    monkeypatch.setenv(unix_socket.ROUND_VARIABLE, "0,1,1")
    assert first_message.hello(spec("j"), None, CPU).release == __version__
    place = watch._place()
    assert place is not None
    assert place.release == __version__
    _, effects = machine.step(AgentState(record=node_record("n0")), LinkUp(), 0.0)
    (hello,) = (e.message for e in effects if isinstance(e, AgentTell) and isinstance(e.message, AgentHello))
    assert hello.release == __version__


def test_every_torchrun_says_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "s")
    monkeypatch.setitem(
        os.environ, unix_socket.SOCKET_VARIABLE, path
    )  # the handler sets it: put back afterwards
    listener = unix_socket.listen(path)
    listener.setblocking(True)
    heard: list[object] = []

    def play() -> None:
        for answer in (Closed(reason="over"), Attending(address="a")):
            client: socket.socket = listener.accept()[0]
            data = unix_socket.receive(client)
            assert data is not None
            heard.append(from_worker(data))
            unix_socket.send(client, encode(answer))

    playing = threading.Thread(target=play)
    playing.start()
    parameters = RendezvousParameters("elasticd", path, "j", 1, 1)
    with pytest.raises(RendezvousOver):
        LiveHandler(parameters, 10.0).next_rendezvous()
    AgentRequests(path, "j", 10.0).close()
    playing.join(60)
    listener.close()
    assert [type(each) for each in heard] == [Join, Attend]
    assert {each.release for each in heard if isinstance(each, Join | Attend)} == {__version__}
