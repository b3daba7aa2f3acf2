"""The front door of the coordinator's port: strangers, silent or not, shut nobody out who has a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import h11
import httpx2
import msgspec
import pytest

from elasticd.codec.message import encode
from elasticd.config.credentials import Credentials, credentials
from elasticd.config.security import SecuritySection
from elasticd.coordinator.daemon import Coordinator
from elasticd.system import front_door, http_connections
from elasticd.system.front_door import highest_descriptor
from elasticd.wire.coordinator import AgentHello
from tests.certificates import Authority
from tests.coordinator.agents import until
from tests.coordinator.secured import ALPHA, OPERATOR, VIEWER, ask, bearer, link, refusals, secured, tokens
from tests.descriptors import few_descriptors
from tests.machines.cast import node_record

#: Opens connections that say nothing, or one byte, and prints their number.
STRANGER = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
host, port, number, said = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()
opened = []
for _ in range(number):
    sock = socket.create_connection((host, port), timeout=60)
    sock.sendall(said)
    opened.append(sock)
print(len(opened), flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def strangers(coordinator: Coordinator, number: int, said: str = "") -> AsyncIterator[None]:
    """A process that has opened so many connections."""
    port = coordinator.url.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STRANGER, "127.0.0.1", port, str(number), said),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert int(await asyncio.wait_for(process.stdout.readline(), 60)) == number
        yield
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def returning(coordinator: Coordinator, number: int) -> AsyncIterator[None]:
    """So many silent connections, each of which comes back as soon as it is dropped."""
    host, port = coordinator.url.removeprefix("http://").split(":")

    async def hold() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    await reader.read(1)
                finally:
                    writer.close()

    tasks = [asyncio.create_task(hold()) for _ in range(number)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def everything_is_answered(coordinator: Coordinator, known: Credentials, agent: Credentials) -> None:
    assert (await ask(coordinator, "/livez", Credentials(context=known.context))).status_code == 200
    assert (await ask(coordinator, "/v1/status", known)).status_code == 200
    async with link(coordinator, agent, open_timeout=60) as socket:
        await socket.send(encode(AgentHello(record=node_record("alpha"))))
        await until(
            lambda: "alpha" in (nodes := coordinator.leading.state.nodes) and nodes["alpha"].connected, 60
        )
    await until(lambda: not coordinator.leading.state.nodes["alpha"].connected, 60)


def test_silent_strangers_that_come_back_shut_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "CROWDED_SECONDS", 0.3)

    async def body() -> None:
        async with secured(msgspec.structs.replace(tokens(tmp_path), connections=50)) as coordinator:
            async with returning(coordinator, 100):
                await until(lambda: refusals(coordinator).get("silent", 0) > 100, 60)
                for _ in range(5):
                    await everything_is_answered(coordinator, bearer(OPERATOR), bearer(ALPHA))
            assert set(refusals(coordinator)) == {"silent"}, "nobody was crowded out"

    asyncio.run(body())


def test_connections_without_a_handshake_leave_descriptors_for_the_process(tmp_path: Path) -> None:
    async def body() -> None:
        authority = Authority(tmp_path)
        pair = authority.server()
        section = msgspec.structs.replace(tokens(tmp_path), cert=pair.cert, key=pair.key)
        ca = credentials(SecuritySection(ca=authority.ca))
        operator, agent = (Credentials(token=token, context=ca.context) for token in (OPERATOR, ALPHA))
        async with secured(section) as coordinator:
            with few_descriptors(spare=150):
                async with strangers(coordinator, highest_descriptor()):
                    await until(lambda: refusals(coordinator).get("crowded", 0) > 0, 60)
                    assert len(os.listdir("/proc/self/fd")) <= highest_descriptor() + 2
                    pipes = [os.pipe() for _ in range(8)]  # as a process of the planner, or a session of etcd
                    await everything_is_answered(coordinator, operator, agent)
                    for pair_of_ends in pipes:
                        for end in pair_of_ends:
                            os.close(end)

    asyncio.run(body())


@pytest.mark.parametrize("others_address", [True, False])
def test_handshakes_that_stop_halfway_hold_up_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_address: bool
) -> None:
    monkeypatch.setattr(front_door, "HANDSHAKES", 4)
    monkeypatch.setattr(front_door, "CROWDED_SECONDS", 30.0 if others_address else 0.3)
    monkeypatch.setattr(front_door, "HANDSHAKE_SECONDS", 30.0)

    async def body() -> None:
        authority = Authority(tmp_path)
        pair = authority.server()
        section = msgspec.structs.replace(tokens(tmp_path), cert=pair.cert, key=pair.key)
        ca = credentials(SecuritySection(ca=authority.ca))
        async with secured(section) as coordinator, strangers(coordinator, 12, "\x16"):
            options = {"local_addr": ("127.0.0.9", 0)} if others_address else {}
            agent = Credentials(token=ALPHA, context=ca.context)
            async with link(coordinator, agent, open_timeout=20, **options) as socket:
                await socket.send(encode(AgentHello(record=node_record("alpha"))))
                await until(lambda: "alpha" in coordinator.leading.state.nodes)

    asyncio.run(body())


def test_address_with_most_strangers_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "MOST_STRANGERS", 16)

    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            host, port = coordinator.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.9", 0))
            async with strangers(coordinator, 100):
                await until(lambda: refusals(coordinator).get("crowded", 0) >= 80)
                writer.write(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(body())


def test_newcomers_wait_where_no_address_has_many_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "MOST_STRANGERS", 8)
    monkeypatch.setattr(front_door, "FEW_STRANGERS", 2)
    monkeypatch.setattr(front_door, "CROWDED_SECONDS", 0.5)

    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            host, port = coordinator.url.removeprefix("http://").split(":")
            writers = [
                (await asyncio.open_connection(host, int(port), local_addr=(f"127.0.0.{n}", 0)))[1]
                for n in range(10, 18)
            ]
            await everything_is_answered(coordinator, bearer(OPERATOR), bearer(ALPHA))
            assert set(refusals(coordinator)) == {"silent"}
            for writer in writers:
                writer.close()

    asyncio.run(body())


def test_bytes_that_are_no_request_fill_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_connections, "_next_line", 0.0)

    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            host, port = coordinator.url.removeprefix("http://").split(":")
            for _ in range(20):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"\x00\r\n\r\n")
                assert b"400" in await asyncio.wait_for(reader.readline(), 60)
                writer.close()

    asyncio.run(body())
    assert caplog.text.count("Invalid HTTP request") == 1


@pytest.mark.parametrize("what", ["body in many pieces", "long head", "many headers"])
def test_request_that_costs_the_loop_much_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Bytes of one stranger, a quarter of a MiB at once: each piece of a body is an event of its own."""
    head, size, parsed = b"POST /v1/config HTTP/1.1\r\nhost: a\r\n", 256 << 10, 0
    said = {
        "body in many pieces": head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * (size // 6),
        "long head": head + b"a:" + b"b" * size + b"\r\n\r\n",
        "many headers": head + b"a:b\r\n" * (size // 5) + b"\r\n",
    }[what]
    next_event = h11.Connection.next_event

    def counted(self: h11.Connection) -> object:
        nonlocal parsed
        event = next_event(self)
        parsed += 1 if isinstance(event, h11.Data) else len(getattr(event, "headers", ()))
        return event

    monkeypatch.setattr(h11.Connection, "next_event", counted)

    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator:
            host, port = coordinator.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(), 60)
                assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 413"), answer
            writer.close()
            await everything_is_answered(coordinator, bearer(OPERATOR), bearer(ALPHA))

    asyncio.run(body())
    assert parsed < 2 * http_connections.MOST_PIECES


def test_body_in_some_pieces_is_taken(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in b'{"values": {"policy.paused": true}, "by": "alice"}':
            yield bytes([piece])

    async def body() -> None:
        async with secured(tokens(tmp_path)) as coordinator, httpx2.AsyncClient(timeout=60) as client:
            url, headers = f"{coordinator.url}/v1/config", bearer(OPERATOR).headers()
            assert (await client.post(url, content=pieces(), headers=headers)).status_code == 200

    asyncio.run(body())


def test_limit_of_connections_counts_those_that_showed_a_token(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(msgspec.structs.replace(tokens(tmp_path), connections=1)) as coordinator:
            async with strangers(coordinator, 20), link(coordinator, bearer(ALPHA)) as socket:
                await socket.send(encode(AgentHello(record=node_record("alpha"))))
                await until(lambda: "alpha" in coordinator.leading.state.nodes)
                refused = await ask(coordinator, "/v1/status", bearer(VIEWER))
                assert refused.status_code == 503
                assert "[security] connections" in refused.json()["error"]
                assert (await ask(coordinator, "/livez")).status_code == 200, "a probe is a stranger"
            await until(lambda: not coordinator.leading.state.nodes["alpha"].connected)
            assert (await ask(coordinator, "/v1/status", bearer(VIEWER))).status_code == 200

    asyncio.run(body())


def test_strangers_of_an_address_use_up_no_requests_of_a_token_there(tmp_path: Path) -> None:
    async def body() -> None:
        async with secured(msgspec.structs.replace(tokens(tmp_path), requests_per_second=1.0)) as coordinator:
            asked = [(await ask(coordinator, "/v1/status")).status_code for _ in range(8)]
            assert 429 in asked
            assert (await ask(coordinator, "/v1/status", bearer(OPERATOR))).status_code == 200

    asyncio.run(body())


@pytest.mark.parametrize(
    ("address", "party"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_client_of_ipv6_is_its_network(address: str, party: str) -> None:
    assert front_door.network_of(address) == party
