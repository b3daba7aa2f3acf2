"""The connection that a cut agent keeps is for a node that this leader cut off, and for that node's agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from elasticd.codec.message import encode
from elasticd.config.credentials import Credentials
from elasticd.config.tree import ChaosSection
from elasticd.coordinator.daemon import Coordinator
from elasticd.wire.coordinator import AgentHello
from tests.coordinator.agents import agent, coordinating, post, until
from tests.coordinator.secured import AGENT, ALPHA, OPERATOR, ask, bearer, link, refusals, secured, tokens
from tests.machines.cast import node_record

CUT = {"action": "cut", "node": "alpha", "seconds": 0.0}


def stays(coordinator: Coordinator, node: str, known: Credentials = bearer("")) -> connect:  # noqa: B008 - frozen
    url = f"{coordinator.url.replace('http', 'ws', 1)}/v1/chaos/cut/{node}"
    return connect(url, proxy=None, additional_headers=known.headers())


async def refused(coordinator: Coordinator, node: str, known: Credentials = bearer("")) -> None:  # noqa: B008
    with pytest.raises(InvalidStatus):
        await stays(coordinator, node, known)


async def closed(socket: ClientConnection) -> None:
    await asyncio.wait_for(socket.wait_closed(), 60)


def test_nobody_stays_where_chaos_is_off_or_nothing_was_cut() -> None:
    async def body() -> None:
        async with coordinating(chaos=False) as coordinator, agent(coordinator, node_record("alpha")):
            await refused(coordinator, "alpha")
        async with coordinating() as coordinator, agent(coordinator, node_record("alpha")):
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            await refused(coordinator, "alpha")
            assert (await post(coordinator, "/v1/chaos", CUT))[0] == 200
            await refused(coordinator, "beta")
            async with stays(coordinator, "alpha") as socket:
                await refused(coordinator, "alpha")  # once
                assert (await post(coordinator, "/v1/chaos", {"action": "heal", "node": "alpha"}))[0] == 200
                await closed(socket)
            await refused(coordinator, "alpha")

    asyncio.run(body())


def test_token_of_one_node_says_nothing_of_another_nodes_cut(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            section = msgspec.structs.replace(coordinator.config, chaos=ChaosSection(enabled=True))
            coordinator.reconfigure(section)
            async with link(coordinator, bearer(AGENT)) as beta:
                await beta.send(encode(AgentHello(record=node_record("beta"))))
                await until(lambda: "beta" in coordinator.leading.state.nodes)
                content = msgspec.json.encode({**CUT, "node": "beta"})
                answer = await ask(coordinator, "/v1/chaos", bearer(OPERATOR), method="POST", content=content)
                assert answer.status_code == 200, answer.text
                await refused(coordinator, "beta", bearer(ALPHA))
                assert refusals(coordinator)["impostor"] == 1
                async with stays(coordinator, "beta", bearer(AGENT)):
                    pass

    asyncio.run(body())
