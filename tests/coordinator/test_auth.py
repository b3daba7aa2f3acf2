"""Who may do what at the coordinator's port: tokens, roles, names of nodes, and pages of other sites."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import InvalidStatus

from elasticd.codec.message import encode
from elasticd.config.credentials import Credentials
from elasticd.config.security import Role, SecuritySection
from elasticd.config.tree import ConfigError
from elasticd.coordinator.auth import Authorizer, Caller, CallerProof, needed
from elasticd.machines.job.state.events import AgentUp
from elasticd.system.network_addresses import is_loopback
from elasticd.wire.coordinator import AgentHello, AgentRejected, to_agent
from tests.coordinator.agents import PLANNER, until
from tests.coordinator.secured import (
    AGENT,
    ALPHA,
    OPERATOR,
    VIEWER,
    ask,
    bearer,
    link,
    private,
    refusals,
    secured,
    tokens,
)
from tests.machines.cast import node_record

READS = ("/v1/status", "/v1/events", "/v1/config", "/metrics")
DRAIN = {"method": "POST", "content": b'{"on": true}'}


def test_each_role_may_do_what_is_its_own_and_no_more(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            for path in ("/livez", "/readyz"):
                assert (await ask(coordinator, path)).status_code == 200, "probes have no token"
            for path in READS:
                asked = [await ask(coordinator, path, bearer(t)) for t in (VIEWER, OPERATOR, AGENT)]
                assert [answer.status_code for answer in asked] == [200, 200, 403]
                assert (await ask(coordinator, path)).status_code == 401
            drains = [
                (await ask(coordinator, "/v1/nodes/alpha/drain", bearer(t), **DRAIN))  # type: ignore[arg-type]
                for t in (VIEWER, AGENT, OPERATOR)
            ]
            assert [answer.status_code for answer in drains] == [403, 403, 404], "404: there is no such node"
            assert drains[0].json()["error"] == "role viewer may not do this: it needs a token of operator"
            counted = refusals(coordinator)
            assert (counted["unauthenticated"], counted["forbidden"]) == (4, 6)

    asyncio.run(body())


def test_stranger_is_told_the_remedy_and_never_the_token(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            answer = await ask(coordinator, "/v1/status")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "asks for a token: set $ELASTICD_TOKEN" in answer.json()["error"]
            wrong = await ask(coordinator, "/v1/status", bearer("wrong-0123456789abcdef"))
            assert wrong.status_code == 401
            assert "not known here" in wrong.json()["error"]
            assert "wrong-" not in wrong.text
            basic = await ask(coordinator, "/v1/status", headers={"Authorization": f"Basic {VIEWER}"})
            assert basic.status_code == 401
            unknown = await ask(coordinator, "/v1/nothing")
            assert unknown.status_code == 401, "who is not known does not learn which paths there are"

    asyncio.run(body())


def test_agents_socket_is_for_agents_and_operators(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            for token, status in ((VIEWER, 403), ("nobody-0123456789abcdef", 401)):
                with pytest.raises(InvalidStatus) as refused:
                    await link(coordinator, bearer(token))
                assert refused.value.response.status_code == status
                assert b'{"error":' in (refused.value.response.body or b"")
            for token, name in ((AGENT, "beta"), (OPERATOR, "gamma"), (ALPHA, "alpha")):
                async with link(coordinator, bearer(token)) as socket:
                    await socket.send(encode(AgentHello(record=node_record(name))))
                    await until(lambda name=name: name in coordinator.leading.state.nodes)  # type: ignore[misc]

    asyncio.run(body())


def test_token_of_one_node_does_not_speak_for_another(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator, link(coordinator, bearer(ALPHA)) as socket:
            await socket.send(encode(AgentHello(record=node_record("beta"))))
            said = to_agent(await socket.recv(decode=False))
            assert isinstance(said, AgentRejected)
            assert "for node 'alpha', not for 'beta'" in said.reason
            assert "beta" not in coordinator.leading.state.nodes
            assert refusals(coordinator) == {"hello": 1}

    asyncio.run(body())


def test_agent_that_calls_itself_another_later_is_cut_off(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(SecuritySection()) as coordinator, link(coordinator, bearer("")) as socket:
            await socket.send(encode(AgentHello(record=node_record("alpha"))))
            await socket.send(encode(AgentHello(record=node_record("beta"))))
            await asyncio.wait_for(socket.wait_closed(), 60)
            assert set(coordinator.leading.state.nodes) == {"alpha"}
            assert refusals(coordinator) == {"impostor": 1}

    asyncio.run(body())


def test_change_is_written_with_the_name_of_who_asked(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            content = b'{"values": {"policy.paused": true}, "by": "me"}'
            answer = await ask(coordinator, "/v1/config", bearer(OPERATOR), method="POST", content=content)
            assert answer.status_code == 200
            assert answer.json()["history"][-1]["by"] == "me (alice)"

    asyncio.run(body())


def test_tokens_are_read_anew_and_wrong_ones_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        section = tokens(tmp_path)
        async with secured(section) as coordinator:
            private(tmp_path / "viewers", "short\n")
            coordinator.reconfigure(coordinator.config)
            assert "tokens and certificate stay as they are" in caplog.text
            assert (await ask(coordinator, "/v1/status", bearer(VIEWER))).status_code == 200
            private(tmp_path / "viewers", "other-0123456789abcdef\n")
            coordinator.reconfigure(coordinator.config)
            assert (await ask(coordinator, "/v1/status", bearer(VIEWER))).status_code == 401
            assert (await ask(coordinator, "/v1/status", bearer("other-0123456789abcdef"))).status_code == 200

    asyncio.run(body())


async def read_all(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


def test_token_that_was_taken_back_ends_its_link_and_its_live_feed(tmp_path: Path) -> None:
    async def body() -> None:
        section = tokens(tmp_path)
        async with (
            secured(section) as coordinator,
            link(coordinator, bearer(ALPHA)) as revoked,
            link(coordinator, bearer(AGENT)) as stays,
            httpx2.AsyncClient(base_url=coordinator.url, trust_env=False, timeout=60) as client,
            client.stream("GET", "/v1/live", headers=bearer(VIEWER).headers()) as feed,
        ):
            await revoked.send(encode(AgentHello(record=node_record("alpha"))))
            await stays.send(encode(AgentHello(record=node_record("beta"))))
            await until(lambda: set(coordinator.leading.state.nodes) == {"alpha", "beta"})
            lines = feed.aiter_lines()
            await anext(lines)
            private(tmp_path / "viewers", "other-0123456789abcdef\n")
            private(tmp_path / "agents", f"{AGENT}\n")
            coordinator.reconfigure(coordinator.config)
            await asyncio.wait_for(revoked.wait_closed(), 60)
            with pytest.raises(httpx2.TransportError):
                await asyncio.wait_for(read_all(lines), 60)
            with pytest.raises(InvalidStatus, match="401"):
                await link(coordinator, bearer(ALPHA))
            assert coordinator.leading.state.nodes["beta"].connected
            assert refusals(coordinator)["revoked"] == 2

    asyncio.run(body())


def test_page_of_another_site_may_change_nothing() -> None:
    async def body() -> None:
        async with secured(SecuritySection()) as coordinator:
            foreign = {"Origin": "https://evil.example"}
            drain = "/v1/nodes/alpha/drain"
            answer = await ask(coordinator, drain, headers=foreign, **DRAIN)  # type: ignore[arg-type]
            assert answer.status_code == 403
            own = {"Origin": coordinator.url}
            assert (await ask(coordinator, drain, headers=own, **DRAIN)).status_code == 404  # type: ignore[arg-type]
            with pytest.raises(InvalidStatus, match="403"):
                await link(coordinator, bearer(""), origin="https://evil.example")
            assert refusals(coordinator) == {"origin": 2}

    asyncio.run(body())


@pytest.mark.parametrize("asks", [False, True])
def test_a_name_that_another_site_had_lead_here_is_answered_where_tokens_are_asked_for_alone(
    asks: bool, tmp_path: Path
) -> None:
    """DNS rebinding: the browser sends the page's own name as Host and Origin."""

    async def body() -> None:
        async with secured(tokens(tmp_path) if asks else SecuritySection()) as coordinator:
            port = coordinator.url.rpartition(":")[2]
            known = bearer(OPERATOR) if asks else Credentials()
            for name in ("evil.example", "localhost.evil.example", "[::1", ""):
                rebound = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
                config = {"method": "POST", "content": b'{"by": "x", "values": {"policy.paused": true}}'}
                answer = await ask(coordinator, "/v1/config", known, headers=rebound, **config)  # type: ignore[arg-type]
                assert asks or answer.status_code in (400, 403), name
            for name in ("localhost", "127.0.0.1", "[::1]", "192.0.2.7"):
                answer = await ask(coordinator, "/v1/status", known, headers={"Host": f"{name}:{port}"})
                assert answer.status_code == 200

    asyncio.run(body())


def test_coordinator_that_others_reach_without_tokens_serves_where_that_is_allowed_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from elasticd.config.tree import with_overrides
    from elasticd.coordinator.daemon import Coordinator
    from elasticd.coordinator.election import CannotLead
    from elasticd.store.memory import MemoryStore
    from tests.coordinator.agents import config

    async def body(section: SecuritySection, host: str) -> int:
        import msgspec

        caplog.clear()
        settings = with_overrides(config(), {"coordinator.host": host})
        store = MemoryStore()
        coordinator = Coordinator(msgspec.structs.replace(settings, security=section), store, planner=PLANNER)
        await coordinator.start()
        await coordinator.stop()
        store.close()
        return sum("whoever reaches this" in record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.WARNING):
        with pytest.raises(CannotLead, match=r"set viewers.* insecure = true in \[security\]"):
            asyncio.run(body(SecuritySection(), "0.0.0.0"))
        assert asyncio.run(body(SecuritySection(insecure=True), "0.0.0.0")) == 1
        assert asyncio.run(body(SecuritySection(insecure=True), "127.0.0.1")) == 0
        assert asyncio.run(body(SecuritySection(), "127.0.0.1")) == 0
        assert asyncio.run(body(tokens(tmp_path), "0.0.0.0")) == 0
    assert [not is_loopback(host) for host in ("localhost", "::1", "127.8.0.1", "::", "10.0.0.1", "head")] == [
        *(False, False, False, True, True, True)
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("short\n", "a token has 16 or more"),
        ("a b c-0123456789abcdef\n", "write a token, or a name and a token"),
        ("# nothing\n", "holds no token"),
        ("bäd-0123456789abcdef\n", "letters, digits"),
    ],
)
def test_file_of_tokens_that_is_wrong_is_refused_without_showing_it(
    tmp_path: Path, text: str, said: str
) -> None:
    path = private(tmp_path / "viewers", text)
    with pytest.raises(ConfigError, match=said) as error:
        Authorizer.read(SecuritySection(viewers=path))
    assert "0123456789abcdef" not in str(error.value)


def test_file_that_everybody_may_read_and_a_token_of_two_roles_are_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "viewers", f"{VIEWER}\n")
    with pytest.raises(ConfigError, match="listed elsewhere too"):
        Authorizer.read(SecuritySection(viewers=path, operators=path))
    Path(path).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod o="):
        Authorizer.read(SecuritySection(viewers=path))
    with pytest.raises(ConfigError, match=r"viewers /nowhere cannot be read \(No such file"):
        Authorizer.read(SecuritySection(viewers="/nowhere"))


@given(st.binary(max_size=80))
def test_any_header_gives_a_caller_or_none(header: bytes) -> None:
    access = Authorizer({}, asks=True)
    assert access.caller(CallerProof(authorization=header)) is None


@pytest.mark.parametrize(
    ("subject", "caller"),
    [
        ({"commonName": "alpha", "organizationalUnitName": "agent"}, Caller(role=Role.AGENT, name="alpha")),
        ({"commonName": "eve", "organizationalUnitName": "owner"}, None),
        ({"commonName": "eve"}, None),
        ({"organizationalUnitName": "operator"}, None),
    ],
)
def test_certificate_says_its_role_and_name(subject: dict[str, str], caller: Caller | None) -> None:
    shown = {"subject": tuple(((key, value),) for key, value in subject.items())}
    assert Authorizer({}, asks=True).caller(CallerProof(certificate=shown)) == caller
    wrong = CallerProof(authorization=b"Bearer wrong", certificate=shown)
    assert Authorizer({}, asks=True).caller(wrong) is None, "a wrong token is not made good"


@given(st.sampled_from(["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]), st.text())
def test_whatever_is_no_get_needs_an_operator(method: str, path: str) -> None:
    assert needed("http", method, path) == (Role.OPERATOR,)


def test_who_had_what_changed_is_told_with_the_name_of_the_token(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            pause = b'{"values": {"policy.paused": true}, "by": "bob@desk"}'
            answer = await ask(coordinator, "/v1/config", bearer(OPERATOR), method="POST", content=pause)
            assert answer.status_code == 200
            harm = b'{"action": "slow", "device": "alpha/0", "factor": 2}'
            headers = {"x-elasticd-user": "carol@lab\x07"}
            coordinator.leading.apply(AgentUp(record=node_record("alpha")))
            answer = await ask(
                coordinator, "/v1/chaos", bearer(OPERATOR), method="POST", content=harm, headers=headers
            )
            assert answer.status_code == 200, answer.text
            answer = await ask(coordinator, "/v1/chaos", bearer(OPERATOR), method="POST", content=harm)
            told = [event for event in coordinator.leading.journal.events() if event.kind == "asked"]
            assert [event.data["by"] for event in told] == [
                *("bob@desk (alice)", "carol@lab (alice)", "somebody at 127.0.0.1 (alice)"),
            ]
            assert [event.data["action"] for event in told] == ["config", "chaos slow", "chaos slow"]
            assert told[1].data["device"] == "alpha/0"
            refused = await ask(coordinator, "/v1/config", bearer(VIEWER), method="POST", content=pause)
            assert refused.status_code == 403
            assert len([e for e in coordinator.leading.journal.events() if e.kind == "asked"]) == 3

            caller = (await ask(coordinator, "/v1/caller", bearer(OPERATOR))).json()
            assert caller == {"name": "alice", "role": "operator", "asks": True}

    asyncio.run(body())
