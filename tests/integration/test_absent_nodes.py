"""Nodes whose agents end: in good order they leave, else they stay until a user says so."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from elasticd.cli.app import elasticd
from elasticd.testing.waiting import until
from tests.integration.launches import Launches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def nodes(launches: Launches) -> dict[str, bool]:
    """Returns whether each node's agent is connected."""
    return {node["node"]: node["connected"] for node in launches.status()["nodes"]}


def test_agent_that_ends_in_good_order_leaves_and_a_node_that_died_is_forgotten_and_comes_back() -> None:
    with Launches({"a": 1, "b": 1}) as launches:
        cluster = launches.cluster
        until(lambda: nodes(launches) == {"a": True, "b": True})

        async def stop() -> None:
            cluster._agents["b"].stop()
            await cluster._serving["b"]

        cluster.call(stop())
        until(lambda: nodes(launches) == {"a": True})
        texts = [event["text"] for event in cluster.events("node_left", "node_down")]
        assert texts == ["node b has left: its agent ended in good order"]
        assert "unreachable" not in launches.ask("status")

        async def die() -> None:
            """As a machine that is switched off: nothing closes the connection."""
            agent = cluster._agents["a"]
            agent._link.follow(None)

        command = ("forget", "--node", "a", "--coordinator", cluster.coordinator.url)
        early = CliRunner().invoke(elasticd, command)
        assert early.exit_code != 0
        assert "the agent of node a is connected: stop it, and the node leaves" in early.output
        cluster.call(die())
        until(lambda: nodes(launches) == {"a": False})
        assert "node unreachable" in launches.ask("status")
        assert "node a is forgotten" in launches.ask("forget", "--node", "a")
        assert nodes(launches) == {}
        cluster.restart_agent("a")
        until(lambda: nodes(launches) == {"a": True})
