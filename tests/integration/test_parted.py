"""Real processes whose data network breaks in silence, and nothing else: one of two nodes goes on."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from elasticd.chaos.namespaces import Namespaces, namespaces, refusal
from elasticd.offspring import ending_with_us
from elasticd.store.server import find_etcd
from tests import forkserver
from tests.cli.support import call, until_answered
from tests.integration import train_ledger, within
from tests.integration.test_sample import environment

#: The data addresses of the nodes, beside those by which they reach etcd and the coordinator.
DATA = {"a": "10.66.0.2", "b": "10.66.0.3"}
STEPS = 100_000
PATIENCE = 240.0
CONFIG = """
[cluster]
name = "parted"
[etcd]
endpoints = ["{etcd}"]
[coordinator]
host = "{host}"
port = 7070
state = "{folder}"
[agent]
state = "{folder}"
[security]
insecure = true
[chaos]
enabled = true
[emulate]
enabled = true
forward = 5e-4
backward = 1e-3
"""


class Nodes:
    """Two namespaces, each with a control and a data address; a coordinator and etcd on the first."""

    def __init__(self, folder: Path, net: Namespaces, stack: contextlib.ExitStack) -> None:
        self.folder, self.net, self._stack = folder, net, stack
        self.file = folder / "elasticd.toml"
        self.runs: dict[str, forkserver.Forked] = {}

    def start(self, node: str, name: str, *command: str) -> None:
        with (self.folder / name).open("wb") as log:
            process = subprocess.Popen(
                ending_with_us([*self.net.within(node), *command]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    def run(self, node: str) -> None:
        options = (
            "--job",
            "job",
            "--nnodes",
            "2",
            "--devices",
            "1",
            "--socket",
            str(self.folder / f"{node}.sock"),
        )
        script = (train_ledger.__file__, str(self.folder), str(STEPS), json.dumps({"zero": 1, "replicas": 2}))
        arguments = (self.net.name(node), "run", *options, *script)
        log = self.folder / f"run-{node}"
        self.runs[node] = forkserver.start(
            Path(within.__file__), *arguments, environment=environment(), output=log
        )
        self._stack.callback(self.runs[node].wait, 60)
        self._stack.callback(self.runs[node].kill)

    def steps(self, node: str) -> int:
        return sum(len(path.read_text().splitlines()) for path in self.folder.glob(f"ledger-{node}:0-*"))

    def ip(self, node: str, *arguments: str) -> None:
        subprocess.run(
            ("ip", "-n", self.net.name(node), *arguments), check=True, capture_output=True, text=True
        )

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            logs = call("logs", "--config", str(self.file)).output if time.monotonic() > deadline else ""
            assert time.monotonic() < deadline, logs
            time.sleep(0.1)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if why := refusal():
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        made = Nodes(tmp_path, stack.enter_context(namespaces(("a", "b"))), stack)
        for node, address in DATA.items():
            made.ip(node, "address", "add", f"{address}/24", "dev", "eth0")
        endpoint = f"{made.net.address('a')}:2379"
        text = CONFIG.format(etcd=endpoint, host=made.net.address("a"), folder=tmp_path)
        made.file.write_text(text)
        client, peer = f"http://{endpoint}", f"http://{made.net.address('a')}:2380"
        urls = ("--listen-client-urls", client, "--advertise-client-urls", client)
        urls += ("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer)
        cluster = ("--name", "one", "--initial-cluster", f"one={peer}", "--log-level", "warn")
        data = ("--data-dir", str(tmp_path / "data"), "--unsafe-no-fsync")
        made.start("a", "etcd", find_etcd(), *urls, *cluster, *data)
        yield made


def daemons(nodes: Nodes) -> Sequence[str]:
    """Starts them; the options of commands that ask them."""
    named = ("--config", str(nodes.file))
    nodes.start("a", "coordinator", sys.executable, "-m", "elasticd", "coordinator", *named)
    until_answered("status", *named, wanted="cluster parted")
    for node, address in DATA.items():
        options = ("--node", node, "--socket", str(nodes.folder / f"{node}.sock"), "--address", address)
        nodes.start(node, f"agent-{node}", sys.executable, "-m", "elasticd_agent", *options, *named)
    for node in DATA:
        until_answered("status", *named, wanted=f"{node}/0")
    return named


@pytest.mark.full
@pytest.mark.slow
def test_one_of_two_nodes_goes_on_when_their_data_network_breaks_in_silence(nodes: Nodes) -> None:
    """A route swallows what b sends to a's data address: no socket is reset, and both reach all else."""
    named = daemons(nodes)
    for node in DATA:
        nodes.run(node)
    nodes.until(lambda: min(map(nodes.steps, DATA)) >= 5)
    done = call("chaos", "cut", "b", "--data", "a", "--one-way", *named)
    assert "what node b sends to node a on the data network is to be lost" in done.output
    before = {node: nodes.steps(node) for node in DATA}
    nodes.until(lambda: max(nodes.steps(node) - before[node] for node in DATA) >= 10)
    assert f"sends to {DATA['a']} is swallowed by a route" in (nodes.folder / "agent-b").read_text()
    logs = call("logs", *named).output
    assert "nodes a and b do not reach each other on the data network" in logs
    assert logs.count("fence ") <= 6, logs
    status = json.loads(call("status", "--json", *named).output)
    assert {node["node"]: node["connected"] for node in status["nodes"]} == {"a": True, "b": True}
