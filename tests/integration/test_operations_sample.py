"""The sample file of docs/operations.md starts a cluster that trains, on two nodes with their own addresses."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from elasticd.config import tree
from elasticd.testing.network_namespaces import namespaces, refusal
from tests.cli.support import call, until_answered
from tests.etcds import SharedEtcd
from tests.forkserver import ROOT
from tests.integration.apart import Apart

STEPS = 6
ENDPOINTS = '["etcd0:2379", "etcd1:2379", "etcd2:2379"]'


def sample() -> str:
    """The file, as the page has it."""
    page = (ROOT / "docs/operations.md").read_text()
    found = re.search(r"4\. \*\*One file\*\*[^\n]*\n\n((?: {8}[^\n]*\n)+)", page)
    assert found is not None
    return dedent(found[1])


@pytest.fixture
def nodes(tmp_path: Path, shared_etcd: SharedEtcd) -> Iterator[Apart]:
    with contextlib.ExitStack() as stack:
        made = Apart(tmp_path, None if refusal() else stack.enter_context(namespaces(("a", "b"))), stack)
        endpoint = made.etcd() if made.net is not None else shared_etcd.endpoint
        assert ENDPOINTS in sample()
        made.file.write_text(sample().replace(ENDPOINTS, f'["{endpoint}"]'))
        yield made


def test_sample_file_is_one_that_is_understood() -> None:
    read = tree.parse(sample(), "docs/operations.md")
    assert read.coordinator.host == "0.0.0.0"
    assert read.agent.address is None
    assert len(read.etcd.endpoints) == 3


@pytest.mark.slow
def test_sample_file_starts_a_cluster_that_trains(nodes: Apart) -> None:
    """Each agent finds its node's address by itself, where nodes are namespaces. A node that would listen for
    itself alone is refused beside the others."""
    named, port = ("--config", str(nodes.file)), () if nodes.net is not None else ("--port", "0")
    nodes.elasticd("a", "coordinator", "elasticd", "coordinator", *port)
    until_answered("status", *named, wanted="cluster prod")
    for node in ("a", "b"):
        address = () if nodes.net is not None else ("--address", nodes.address(node))
        options = ("--node", node, "--socket", nodes.socket(node), *address)
        nodes.elasticd(node, f"agent-{node}", "elasticd_agent", *options)
    until_answered("status", *named, wanted="a/0")
    until_answered("status", *named, wanted="b/0")
    status = json.loads(call("status", "--json", *named).output)
    assert {found["node"]: found["address"] for found in status["nodes"]} == {
        node: nodes.address(node) for node in ("a", "b")
    }
    runs = {node: nodes.run(node, STEPS) for node in ("a", "b")}
    for node, process in runs.items():
        assert process.wait(240) == 0, nodes.said(f"run-{node}")
    for node in ("a", "b"):
        (ledger,) = nodes.folder.glob(f"ledger-{node}:0-*")
        assert len(ledger.read_text().splitlines()) == STEPS
    assert "finished" in call("logs", *named).output
    if nodes.net is not None:
        options = ("--node", "c", "--address", "127.0.0.1", "--socket", nodes.socket("c"))
        refused = nodes.elasticd("b", "agent-c", "elasticd_agent", *options)
        assert refused.wait(60) == 1
        assert "node 'c' would listen at 127.0.0.1, and node " in nodes.said("agent-c")
