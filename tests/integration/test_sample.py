"""The sample file of docs/operations.md starts a cluster that trains, on two nodes with their own addresses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from elasticd import config
from elasticd.chaos.namespaces import Namespaces, namespaces, refusal
from elasticd.offspring import ending_with_us
from elasticd.store.server import find_etcd
from tests import forkserver
from tests.cli.support import call, until_answered
from tests.etcds import SharedEtcd
from tests.forkserver import ROOT
from tests.integration import train_ledger, within

STEPS = 6
ENDPOINTS = '["etcd0:2379", "etcd1:2379", "etcd2:2379"]'


def sample() -> str:
    """The file, as the page has it."""
    page = (ROOT / "docs/operations.md").read_text()
    found = re.search(r"4\. \*\*One file\*\*[^\n]*\n\n((?: {8}[^\n]*\n)+)", page)
    assert found is not None
    return dedent(found[1])


class Nodes:
    """Two nodes: network namespaces, or (without `net`) two loopback addresses of this machine."""

    def __init__(self, folder: Path, net: Namespaces | None, stack: contextlib.ExitStack) -> None:
        self.folder, self._net, self._stack = folder, net, stack
        self.apart = net is not None
        self.file = folder / "elasticd.toml"

    def address(self, node: str) -> str:
        return self._net.address(node) if self._net is not None else {"a": "127.0.0.2", "b": "127.0.0.3"}[node]

    def socket(self, node: str) -> str:
        return str(self.folder / f"{node}.sock")

    def start(self, node: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A program on a node, whose output is in the file of its name; ended at the end."""
        begin: Sequence[str] = self._net.within(node) if self._net is not None else ()
        with (self.folder / name).open("wb") as log:
            process = subprocess.Popen(
                ending_with_us([*begin, *command]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return process

    def elasticd(self, node: str, name: str, module: str, *options: str) -> subprocess.Popen[bytes]:
        return self.start(node, name, sys.executable, "-m", module, *options, "--config", str(self.file))

    def run(self, node: str) -> forkserver.Forked:
        """`elasticd run` on a node."""
        namespace = self._net.name(node) if self._net is not None else ""
        options = ("--job", "job", "--nnodes", "2", "--devices", "1", "--socket", self.socket(node))
        # A replica of the state on each node: so small a model could do with one device.
        script = (train_ledger.__file__, str(self.folder), str(STEPS), json.dumps({"zero": 1, "replicas": 2}))
        log = self.folder / f"run-{node}"
        arguments = (namespace, "run", *options, *script)
        process = forkserver.start(Path(within.__file__), *arguments, environment=environment(), output=log)
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.terminate)
        return process

    def said(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")


def environment() -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("ELASTICD_", "ETCD_"))}
    return {**ours, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def nodes(tmp_path: Path, shared_etcd: SharedEtcd) -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        net = None if refusal() else stack.enter_context(namespaces(("a", "b")))
        made = Nodes(tmp_path, net, stack)
        endpoint = shared_etcd.endpoint
        if net is not None:  # where another namespace reaches it
            endpoint = f"{made.address('a')}:2379"
            client, peer = f"http://{endpoint}", f"http://{made.address('a')}:2380"
            urls = ("--listen-client-urls", client, "--advertise-client-urls", client)
            urls += ("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer)
            cluster = ("--name", "one", "--initial-cluster", f"one={peer}", "--log-level", "warn")
            data = ("--data-dir", str(tmp_path / "data"), "--unsafe-no-fsync")
            made.start("a", "etcd", find_etcd(), *urls, *cluster, *data)
        assert ENDPOINTS in sample()
        made.file.write_text(sample().replace(ENDPOINTS, f'["{endpoint}"]'))
        yield made


def test_sample_file_is_one_that_is_understood() -> None:
    read = config.parse(sample(), "docs/operations.md")
    assert read.coordinator.host == "0.0.0.0"
    assert read.agent.address is None
    assert len(read.etcd.endpoints) == 3


@pytest.mark.slow
def test_sample_file_starts_a_cluster_that_trains(nodes: Nodes) -> None:
    """Each agent finds its node's address by itself, where nodes are namespaces. A node that would listen for
    itself alone is refused beside the others."""
    named, port = ("--config", str(nodes.file)), () if nodes.apart else ("--port", "0")
    nodes.elasticd("a", "coordinator", "elasticd", "coordinator", *port)
    until_answered("status", *named, wanted="cluster prod")
    for node in ("a", "b"):
        address = () if nodes.apart else ("--address", nodes.address(node))
        options = ("--node", node, "--socket", nodes.socket(node), *address)
        nodes.elasticd(node, f"agent-{node}", "elasticd_agent", *options)
    until_answered("status", *named, wanted="a/0")
    until_answered("status", *named, wanted="b/0")
    status = json.loads(call("status", "--json", *named).output)
    assert {found["node"]: found["address"] for found in status["nodes"]} == {
        node: nodes.address(node) for node in ("a", "b")
    }
    runs = {node: nodes.run(node) for node in ("a", "b")}
    for node, process in runs.items():
        assert process.wait(240) == 0, nodes.said(f"run-{node}")
    for node in ("a", "b"):
        (ledger,) = nodes.folder.glob(f"ledger-{node}:0-*")
        assert len(ledger.read_text().splitlines()) == STEPS
    assert "finished" in call("logs", *named).output
    if nodes.apart:
        options = ("--node", "c", "--address", "127.0.0.1", "--socket", nodes.socket("c"))
        refused = nodes.elasticd("b", "agent-c", "elasticd_agent", *options)
        assert refused.wait(60) == 1
        assert "node 'c' would listen at 127.0.0.1, and node " in nodes.said("agent-c")
