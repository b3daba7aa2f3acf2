"""The agent's link to a leader that asks for tokens and speaks TLS: let in, told why not, tokens renewed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from elasticd_agent.coordinator_link import Link

from elasticd.config.credentials import credentials
from elasticd.config.security import SecuritySection
from elasticd.machines.agent.state import Event, LinkUp
from elasticd.wire.coordinator import AgentHello
from tests.certificates import Authority
from tests.coordinator.agents import until
from tests.coordinator.secured import AGENT, VIEWER, private, refusals, secured, tokens
from tests.machines.cast import node_record


def test_agent_that_is_refused_says_so_once_and_gets_in_with_a_new_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        pair = authority.server()
        section = msgspec.structs.replace(tokens(tmp_path), cert=pair.cert, key=pair.key)
        own = SecuritySection(ca=authority.ca, token_file=private(tmp_path / "token", VIEWER))
        events: list[Event] = []
        async with secured(section) as coordinator:
            link = Link(events.append, {}, lambda: credentials(own))
            link.follow(coordinator.url)
            await until(lambda: refusals(coordinator).get("forbidden", 0) >= 3, 60)
            said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            (refusal,) = (line for line in said if "cannot be linked to" in line)
            assert "it needs a token of agent or operator" in refusal
            assert VIEWER not in caplog.text
            private(tmp_path / "token", AGENT)
            await until(lambda: LinkUp() in events, 60)
            link.send(AgentHello(record=node_record("alpha")))
            await until(lambda: "alpha" in coordinator.leading.state.nodes, 60)
            await link.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(body())


@pytest.mark.parametrize("secure", [True, False])
def test_leader_that_speaks_other_than_agreed_gets_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, secure: bool
) -> None:
    async def body() -> None:
        authority, others = Authority(tmp_path), Authority(tmp_path, "others")
        pair = authority.server()
        section = SecuritySection(cert=pair.cert, key=pair.key) if secure else SecuritySection()
        own = SecuritySection(ca=others.ca, token_file=private(tmp_path / "token", AGENT))
        async with secured(section) as coordinator:
            link = Link(lambda _: None, {}, lambda: credentials(own))
            link.follow(coordinator.url)
            await until(lambda: "cannot be linked to" in caplog.text, 60)
            await link.close()
        assert ("check [security] ca here" if secure else "speaks no TLS") in caplog.text

    asyncio.run(body())
