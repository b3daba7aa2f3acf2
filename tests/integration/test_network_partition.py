"""Real processes whose data network breaks in silence, and nothing else: one of two nodes goes on."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from elasticd.testing.network_namespaces import Namespaces, namespaces, refusal
from tests.cli.support import call, until_answered
from tests.integration.apart import Apart

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


class Nodes(Apart):
    """Two namespaces, each with a control and a data address; a coordinator and etcd on the first."""

    net: Namespaces

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
        text = CONFIG.format(etcd=made.etcd(), host=made.net.address("a"), folder=tmp_path)
        made.file.write_text(text)
        yield made


def daemons(nodes: Nodes) -> Sequence[str]:
    """Starts them; the options of commands that ask them."""
    named = ("--config", str(nodes.file))
    nodes.elasticd("a", "coordinator", "elasticd", "coordinator")
    until_answered("status", *named, wanted="cluster parted")
    for node, address in DATA.items():
        options = ("--node", node, "--socket", nodes.socket(node), "--address", address)
        nodes.elasticd(node, f"agent-{node}", "elasticd_agent", *options)
    for node in DATA:
        until_answered("status", *named, wanted=f"{node}/0")
    return named


@pytest.mark.full
@pytest.mark.slow
def test_one_of_two_nodes_goes_on_when_their_data_network_breaks_in_silence(nodes: Nodes) -> None:
    """A route swallows what b sends to a's data address: no socket is reset, and both reach all else."""
    named = daemons(nodes)
    for node in DATA:
        nodes.run(node, STEPS)
    nodes.until(lambda: min(map(nodes.steps, DATA)) >= 5)
    done = call("chaos", "cut", "b", "--data", "a", "--one-way", *named)
    assert "what node b sends to node a on the data network is to be lost" in done.output
    before = {node: nodes.steps(node) for node in DATA}
    nodes.until(lambda: max(nodes.steps(node) - before[node] for node in DATA) >= 10)
    assert f"sends to {DATA['a']} is swallowed by a route" in nodes.said("agent-b")
    logs = call("logs", *named).output
    assert "nodes a and b do not reach each other on the data network" in logs
    assert logs.count("fence ") <= 6, logs
    status = json.loads(call("status", "--json", *named).output)
    assert {node["node"]: node["connected"] for node in status["nodes"]} == {"a": True, "b": True}
