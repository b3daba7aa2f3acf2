"""TLS of the coordinator's port: for agents and commands, with certificates in place of tokens, renewed."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from websockets.exceptions import InvalidStatus

from elasticd.cli import doctor
from elasticd.client import ApiClient, CannotReach
from elasticd.codec.message import encode
from elasticd.config.credentials import Credentials, credentials, server_context
from elasticd.config.security import SecuritySection
from elasticd.config.tree import ConfigError
from elasticd.coordinator.auth import Authorizer
from elasticd.wire.coordinator import AgentHello
from tests.certificates import Authority
from tests.coordinator.agents import until
from tests.coordinator.secured import VIEWER, ask, link, private, refusals, secured, tokens
from tests.machines.cast import node_record


def encrypted(authority: Authority) -> SecuritySection:
    pair = authority.server()
    return SecuritySection(cert=pair.cert, key=pair.key)


def client(authority: Authority, name: str = "", *units: str) -> Credentials:
    section = SecuritySection(ca=authority.ca)
    if name:
        pair = authority.client(name, *units)
        section = msgspec.structs.replace(section, client_cert=pair.cert, client_key=pair.key)
    return credentials(section)


def test_port_speaks_tls_and_says_so_in_its_url(tmp_path: Path) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        async with secured(encrypted(authority)) as coordinator:
            assert coordinator.url.startswith("https://127.0.0.1:")
            assert (await ask(coordinator, "/v1/status", client(authority))).status_code == 200
            with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await ask(coordinator, "/v1/status", client(Authority(tmp_path, "others")))
            async with link(coordinator, client(authority)) as socket:
                await socket.send(encode(AgentHello(record=node_record("alpha"))))
                await until(lambda: "alpha" in coordinator.leading.state.nodes)

    asyncio.run(body())


def test_certificate_is_taken_for_a_token(tmp_path: Path) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        section = msgspec.structs.replace(encrypted(authority), client_ca=authority.ca)
        async with secured(section) as coordinator:
            viewer = client(authority, "grafana", "viewer")
            assert (await ask(coordinator, "/metrics", viewer)).status_code == 200
            drain = await ask(coordinator, "/v1/nodes/a/drain", viewer, method="POST", content=b'{"on": true}')
            assert drain.status_code == 403
            for known in (
                client(authority),
                client(authority, "eve"),
                client(authority, "eve", "viewer", "agent"),
            ):
                assert (await ask(coordinator, "/metrics", known)).status_code == 401
            assert (await ask(coordinator, "/livez", client(authority))).status_code == 200
            with pytest.raises(InvalidStatus, match="403"):
                await link(coordinator, viewer)
            async with link(coordinator, client(authority, "alpha", "agent")) as socket:
                await socket.send(encode(AgentHello(record=node_record("alpha"))))
                await until(lambda: "alpha" in coordinator.leading.state.nodes)

    asyncio.run(body())


def test_certificate_of_another_authority_does_not_get_through_the_handshake(tmp_path: Path) -> None:
    async def body() -> None:
        authority, others = Authority(tmp_path), Authority(tmp_path, "others")
        section = msgspec.structs.replace(encrypted(authority), client_ca=authority.ca)
        pair = others.client("eve", "operator")
        known = credentials(SecuritySection(ca=authority.ca, client_cert=pair.cert, client_key=pair.key))
        async with secured(section) as coordinator:
            with pytest.raises((httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.ConnectError)):
                await ask(coordinator, "/livez", known)

    asyncio.run(body())


def test_certificate_is_renewed_without_a_restart(tmp_path: Path) -> None:
    async def body() -> None:
        authority, later = Authority(tmp_path), Authority(tmp_path, "later")
        section = encrypted(authority)
        async with secured(section) as coordinator:
            later.server()  # over the same files
            coordinator.reconfigure(coordinator.config)
            assert (await ask(coordinator, "/livez", client(later))).status_code == 200

    asyncio.run(body())


def test_certificate_that_is_revoked_is_not_taken_and_its_connections_end(tmp_path: Path) -> None:
    async def body() -> None:
        authority, others = Authority(tmp_path), Authority(tmp_path, "others")
        pairs = {name: authority.client(name, "agent") for name in ("alpha", "beta")}
        known = {
            name: credentials(SecuritySection(ca=authority.ca, client_cert=pair.cert, client_key=pair.key))
            for name, pair in pairs.items()
        }
        section = msgspec.structs.replace(
            encrypted(authority), client_ca=authority.ca, client_crl=authority.revoked()
        )
        async with (
            secured(section) as coordinator,
            link(coordinator, known["alpha"]) as alpha,
            link(coordinator, known["beta"]) as beta,
        ):
            for name, socket in (("alpha", alpha), ("beta", beta)):
                await socket.send(encode(AgentHello(record=node_record(name))))
            await until(lambda: {"alpha", "beta"} <= coordinator.leading.state.nodes.keys())
            authority.revoked(pairs["alpha"])
            coordinator.reconfigure(coordinator.config)
            await asyncio.wait_for(alpha.wait_closed(), 60)
            with pytest.raises(InvalidStatus, match="401"):
                async with link(coordinator, known["alpha"]):
                    pass
            assert coordinator.leading.state.nodes["beta"].connected
            Path(others.revoked(pairs["beta"])).replace(f"{authority.ca}.crl")
            coordinator.reconfigure(coordinator.config)  # of another authority: it changes nothing
            assert coordinator.leading.state.nodes["beta"].connected
            with pytest.raises(InvalidStatus, match="401"):
                async with link(coordinator, known["alpha"]):
                    pass

    asyncio.run(body())


def test_revocation_list_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    authority, others = Authority(tmp_path), Authority(tmp_path, "others")
    for path, why in (
        (others.revoked(), "no CA in client_ca has signed"),
        (authority.ca, "no revocation list"),
    ):
        section = msgspec.structs.replace(encrypted(authority), client_ca=authority.ca, client_crl=path)
        with pytest.raises(ConfigError, match=why):
            Authorizer.read(section)


def test_command_says_what_is_wrong_with_tls(tmp_path: Path) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)

        def asked(known: Credentials) -> str:
            with pytest.raises(CannotReach) as error, ApiClient(coordinator.url, known) as api:
                api.status()
            return str(error.value)

        async with secured(encrypted(authority)) as coordinator:
            strangers = client(Authority(tmp_path, "others"))
            assert "check ca in section [security]" in await asyncio.to_thread(asked, strangers)
            assert "speaks TLS: set ca" in await asyncio.to_thread(asked, Credentials())
        async with secured(SecuritySection()) as coordinator:
            assert "speaks no TLS, but [security] ca is set" in await asyncio.to_thread(
                asked, client(authority)
            )

    asyncio.run(body())


def test_older_versions_of_tls_are_refused(tmp_path: Path) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        known = client(authority)
        assert known.context is not None
        known.context.minimum_version = ssl.TLSVersion.TLSv1_2
        known.context.maximum_version = ssl.TLSVersion.TLSv1_2
        async with secured(encrypted(authority)) as coordinator:
            with pytest.raises(httpx2.ConnectError):
                await ask(coordinator, "/livez", known)

    asyncio.run(body())


def test_certificate_beside_tokens(tmp_path: Path) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        pair = authority.server()
        section = msgspec.structs.replace(
            tokens(tmp_path), cert=pair.cert, key=pair.key, client_ca=authority.ca
        )
        async with secured(section) as coordinator:
            assert (await ask(coordinator, "/v1/status", client(authority, "me", "viewer"))).status_code == 200
            known = Credentials(token=VIEWER, context=client(authority).context)
            assert (await ask(coordinator, "/v1/status", known)).status_code == 200
            wrong = Credentials(
                token="wrong-0123456789abcdef", context=client(authority, "me", "viewer").context
            )
            assert (await ask(coordinator, "/v1/status", wrong)).status_code == 401
            assert refusals(coordinator) == {"unauthenticated": 1}

    asyncio.run(body())


def test_files_of_tls_that_are_wrong_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.server(), authority.client("other")
    with pytest.raises(ConfigError, match=r"cert and key cannot be used .*KEY_VALUES_MISMATCH"):
        server_context(SecuritySection(cert=pair.cert, key=other.key))
    with pytest.raises(ConfigError, match="key /nowhere cannot be read"):
        server_context(SecuritySection(cert=pair.cert, key="/nowhere"))
    with pytest.raises(ConfigError, match=r"ca = '.*junk' cannot be used"):
        credentials(SecuritySection(ca=private(tmp_path / "junk", "junk")))
    Path(pair.key).chmod(0o644)
    with pytest.raises(ConfigError, match="open to everybody: chmod o="):
        server_context(SecuritySection(cert=pair.cert, key=pair.key))


def test_token_comes_from_the_environment_or_a_file_and_is_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = SecuritySection(token_file=private(tmp_path / "token", f"{VIEWER}\n"))
    monkeypatch.delenv("ELASTICD_TOKEN", raising=False)
    assert credentials(section).headers() == {"Authorization": f"Bearer {VIEWER}"}
    assert VIEWER not in repr(credentials(section))
    monkeypatch.setenv("ELASTICD_TOKEN", "env-0123456789abcdef")
    assert credentials(section).token == "env-0123456789abcdef"
    monkeypatch.setenv("ELASTICD_TOKEN", "too short")
    with pytest.raises(ConfigError, match=r"\$ELASTICD_TOKEN: a token has 16") as error:
        credentials(section)
    assert "too short" not in str(error.value)


@pytest.mark.parametrize(
    ("days", "verdict", "words"),
    [
        (-0.5, "missing", "has expired, and no client trusts it"),
        (5.5, "note", "expires in 5 days"),
        (100.5, "ok", "good for 100 days"),
    ],
)
def test_certificate_that_ends_soon_is_told_by_its_server_and_by_doctor(
    days: float, verdict: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        pair = authority.server(days=days)
        async with secured(SecuritySection(cert=pair.cert, key=pair.key)) as coordinator:
            monkeypatch.setattr(doctor, "leader_url", lambda config: coordinator.url)
            found = await asyncio.to_thread(
                doctor._checked, "certificate", doctor._certificate, coordinator.config
            )
            assert (found.verdict, words in found.found) == (verdict, True), found
            if days < 0:
                with pytest.raises(CannotReach, match="elasticd security renew"):
                    await asyncio.to_thread(ApiClient(coordinator.url, client(authority)).status)
            caplog.clear()
            coordinator._renew()
            assert "tokens and certificate are as in their files now" in caplog.text

    caplog.set_level("INFO")
    asyncio.run(body())
    remedy = "sign a new one by 'elasticd security renew'"
    assert (remedy in caplog.text) == (days < 14)
