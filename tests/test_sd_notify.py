"""The daemons under a service manager: what they tell it, and the units that start them."""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from elasticd_agent.command import command as agent_command

from elasticd.cli.app import elasticd
from elasticd.system.sd_notify import SdNotifier
from tests import forkserver
from tests.etcds import SharedEtcd

UNITS = Path(__file__).resolve().parent.parent / "systemd"
SERVICES = ("elasticd-agent.service", "elasticd-coordinator.service", "elasticd-dashboard.service")
DEADLINE = 60.0


class Manager:
    """A service manager's ear: a datagram socket, and the lines that came in order."""

    def __init__(self, address: str) -> None:
        self.heard: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(0.05)

    def hear(self, most: int = 100) -> None:
        """What is there, up to so many datagrams: a watchdog that is fed goes on for ever."""
        for _ in range(most):
            try:
                self.heard += self._socket.recv(4096).decode().split("\n")
            except TimeoutError:
                return

    def until(self, line: str, times: int = 1) -> None:
        deadline = time.monotonic() + DEADLINE
        while self.heard.count(line) < times:
            assert time.monotonic() < deadline, (line, self.heard)
            self.hear(1)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify"))
    yield found
    found.close()


def test_what_is_told_is_the_protocol_of_sd_notify(manager: Manager, tmp_path: Path) -> None:
    supervisor = SdNotifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    supervisor.ready("leading\nas n0")
    supervisor.reloading()
    supervisor.stopping()
    manager.hear()
    assert manager.heard[:3] == ["READY=1", "STATUS=leading as n0", "RELOADING=1"]
    assert re.fullmatch(r"MONOTONIC_USEC=\d+", manager.heard[3])
    assert manager.heard[4] == "STOPPING=1"


def test_a_socket_in_the_abstract_namespace_is_reached() -> None:
    name = f"@elasticd-test-{secrets.token_hex(8)}"
    manager = Manager(name)
    try:
        SdNotifier({"NOTIFY_SOCKET": name}).status("here")
        manager.hear()
        assert manager.heard == ["STATUS=here"]
    finally:
        manager.close()


@pytest.mark.parametrize("pid", ["", "self", "other"])
def test_the_watchdog_is_fed_by_the_process_that_it_is_for(manager: Manager, tmp_path: Path, pid: str) -> None:
    pids = {"": {}, "self": {"WATCHDOG_PID": "41"}, "other": {"WATCHDOG_PID": "42"}}
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000", **pids[pid]}

    async def watch() -> None:
        task = asyncio.create_task(SdNotifier(environment, pid=41).watch())
        if pid == "other":
            await task
            return
        await asyncio.to_thread(manager.until, "WATCHDOG=1", 3)
        task.cancel()

    asyncio.run(watch())
    manager.hear()
    assert ("WATCHDOG=1" in manager.heard) == (pid != "other")


def test_without_a_manager_and_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    asyncio.run(SdNotifier({}).watch())
    SdNotifier({}).ready("alone")
    SdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("alone")


@pytest.mark.parametrize("daemon", ["agent", "coordinator"])
def test_a_daemon_says_that_it_is_ready_lives_and_ends(
    shared_etcd: SharedEtcd, manager: Manager, tmp_path: Path, daemon: str
) -> None:
    words = {
        "agent": ("elasticd_agent.__main__", "--node=n0", f"--socket={tmp_path / 'a.sock'}", "--devices=1"),
        "coordinator": ("elasticd.__main__", "coordinator", "--name", "c0", "--port", "0"),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICD_")}
    environment |= {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "PYTHONPATH": str(forkserver.ROOT),
        "WATCHDOG_USEC": "200000",
        "XDG_STATE_HOME": str(tmp_path),
    }
    options = ("--etcd", shared_etcd.endpoint, "--cluster", shared_etcd.cluster("services"))
    said = tmp_path / "said"
    process = forkserver.start(*words[daemon], *options, environment=environment, output=said)
    try:
        manager.until("READY=1")
        manager.until("WATCHDOG=1", 3)
        process.send_signal(signal.SIGTERM)
        manager.until("STOPPING=1")
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
    assert manager.heard.index("READY=1") < manager.heard.index("STOPPING=1")


def unit(name: str) -> configparser.ConfigParser:
    """A unit's keys; of one that is given several times the last."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return parser


@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_starts_a_command_that_exists_with_options_that_it_has(name: str) -> None:
    program, *words = shlex.split(unit(name)["Service"]["ExecStart"])
    command: click.Command = agent_command if program.endswith("elasticd-agent") else elasticd
    if isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    context = click.Context(command)
    _, left, _ = command.make_parser(context).parse_args(list(words))
    assert left == []
    assert unit(name)["Service"]["Type"] == "notify"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("name", SERVICES)
def test_systemd_finds_no_fault_with_a_unit_and_it_has_few_rights(name: str, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("elasticd", "elasticd-agent"):
        (programs / program).write_text("#!/bin/sh\n")
        (programs / program).chmod(0o755)
    copy = tmp_path / name
    copy.write_text((UNITS / name).read_text().replace("/opt/elasticd/bin", str(programs)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    exposure = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(copy)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert exposure.returncode == 0, exposure.stdout


@pytest.mark.parametrize("role", ["coordinator", "dashboard"])
def test_drop_in_of_the_docs_gives_a_unit_the_files_that_its_section_names(role: str, tmp_path: Path) -> None:
    page = (UNITS.parent / "docs" / "security.md").read_text()
    (lines,) = re.findall(rf"# elasticd-{role}\.service\n(.*?)```", page, re.S)
    loaded = dict(re.findall(r"(?m)^LoadCredential=(\S+):(\S+)$", lines))
    place = "/etc/elasticd/security"
    command = ["security", "init", str(tmp_path / "made"), "--installed", place, "--host", "c0"]
    assert CliRunner().invoke(elasticd, command).exit_code == 0
    section = (tmp_path / "made" / f"{role}.toml").read_text()
    (edit,) = re.findall(rf"(?m)^    sed -i (\S+) {role}\.toml$", page)
    edited = subprocess.run(["sed", edit], input=section, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(rf'"{place}/([^"]+)"', section))
    assert {*loaded} == named
    assert {*loaded.values()} == {f"{place}/{name}" for name in named}
    assert set(re.findall(rf'"/run/credentials/elasticd-{role}\.service/([^"]+)"', edited)) == named
