"""What is too large, too many, too often or too slow is refused and counted; the others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets import State
from websockets.exceptions import ConnectionClosed, WebSocketException

from elasticd.codec.message import encode
from elasticd.config.security import SecuritySection
from elasticd.coordinator.http import agent_socket, middleware, server
from elasticd.coordinator.http.middleware import LARGEST_BODY_BYTES
from elasticd.coordinator.http.server import serving
from elasticd.store.write_allowance import Allowance
from elasticd.system import front_door
from elasticd.wire.coordinator import AgentHello
from tests.coordinator.agents import until
from tests.coordinator.secured import ask, bearer, link, refusals, secured
from tests.descriptors import few_descriptors
from tests.machines.cast import node_record

DRAIN = "/v1/nodes/alpha/drain"


@asynccontextmanager
async def listening(application: Any, words: list[str]) -> AsyncIterator[tuple[str, int]]:
    """Serves an application as the coordinator's port does; `words` gets the reasons of what is dropped."""
    served = serving(application, SecuritySection(), None, words.append)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(served.serve(sockets=[listener]))
        await until(lambda: served.started and served.door is not None)
        yield listener.getsockname()
        served.should_exit = True
        await task


def test_message_above_the_limit_costs_its_connection_and_is_counted() -> None:
    async def body() -> None:
        async with secured(SecuritySection(message_mib=1)) as coordinator:
            for hello in (True, False):
                async with link(coordinator, bearer("")) as socket:
                    if hello:
                        await socket.send(encode(AgentHello(record=node_record("alpha"))))
                    with contextlib.suppress(ConnectionClosed):
                        await socket.send(b" " * (1 << 20) + b"{}")
                    await asyncio.wait_for(socket.wait_closed(), 60)
                    assert socket.close_code in (1009, 1006)
            await until(lambda: refusals(coordinator) == {"oversized": 2}, 60)

    asyncio.run(body())


def test_body_above_the_limit_is_refused_however_it_comes() -> None:
    async def body() -> None:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b" " * (LARGEST_BODY_BYTES // 4)

        async with secured(SecuritySection()) as coordinator:
            large = b" " * (LARGEST_BODY_BYTES + 1)
            for content in (large, parts()):
                answer = await ask(coordinator, DRAIN, method="POST", content=content)
                assert answer.status_code == 413
                assert "at most 65536 bytes" in answer.json()["error"]
            whole = b" " * (LARGEST_BODY_BYTES - 12) + b'{"on": true}'
            assert (await ask(coordinator, DRAIN, method="POST", content=whole)).status_code == 404
            assert refusals(coordinator) == {"oversized": 2}

    asyncio.run(body())


def test_address_that_asks_too_often_is_told_to_wait() -> None:
    async def body() -> None:
        async with secured(SecuritySection(requests_per_second=1.0)) as coordinator:
            answers = await asyncio.gather(*(ask(coordinator, "/livez") for _ in range(5)))
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert refused.headers["retry-after"] == "1"
            assert refusals(coordinator)["rate"] >= 1

    asyncio.run(body())


def test_agent_that_floods_is_read_more_slowly_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_socket, "MESSAGES_PER_SECOND", 50.0)

    async def body() -> None:
        async with secured(SecuritySection()) as coordinator, link(coordinator, bearer("")) as socket:
            for memory in range(1, 221):
                await socket.send(encode(AgentHello(record=node_record("alpha", memory=memory))))

            def last() -> bool:
                node = coordinator.leading.state.nodes.get("alpha")
                return node is not None and node.record.devices[0].memory == 220

            await until(last, 60)
            assert refusals(coordinator)["rate"] >= 1
            assert socket.state is State.OPEN, "its pongs waited with what it sent"

    asyncio.run(body())


def test_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)

    async def body() -> None:
        async with secured(SecuritySection()) as coordinator:
            host, port = coordinator.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {DRAIN} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n{{".encode())
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert refusals(coordinator) == {"slow": 1}

    asyncio.run(body())


def test_connections_above_the_limit_are_dropped_and_the_others_stay() -> None:
    async def body() -> None:
        async with secured(SecuritySection(connections=2)) as coordinator:
            async with link(coordinator, bearer("")) as socket, link(coordinator, bearer("")):
                await socket.send(encode(AgentHello(record=node_record("alpha"))))
                await until(lambda: "alpha" in coordinator.leading.state.nodes)
                with pytest.raises((OSError, EOFError, WebSocketException)):
                    await link(coordinator, bearer(""), open_timeout=60)
                await until(lambda: refusals(coordinator).get("crowded", 0) >= 1, 60)
                assert coordinator.leading.state.nodes["alpha"].connected
            await until(lambda: not coordinator.leading.state.nodes["alpha"].connected, 60)

    asyncio.run(body())


def test_leader_outlives_the_end_of_its_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with secured(SecuritySection()) as coordinator, link(coordinator, bearer("")) as socket:
            await socket.send(encode(AgentHello(record=node_record("alpha"))))
            await until(lambda: "alpha" in coordinator.leading.state.nodes)
            host, port = coordinator.url.removeprefix("http://").split(":")
            asked: list[asyncio.StreamWriter] = []
            with few_descriptors(spare=16):
                with contextlib.suppress(OSError):
                    while True:
                        asked.append((await asyncio.open_connection(host, int(port)))[1])
                await until(lambda: "takes no connection for a moment" in caplog.text)
                assert coordinator.leading.state.nodes["alpha"].connected
                for writer in asked:
                    writer.close()
            assert len(asked) > 4
            assert (await ask(coordinator, "/readyz")).status_code == 200
            assert coordinator.leading.state.nodes["alpha"].connected

    asyncio.run(body())


def test_connection_that_asks_for_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(front_door, "SILENT_SECONDS", 0.2)

    async def body() -> None:
        words: list[str] = []

        async def application(scope: object, receive: object, send: object) -> None:
            raise AssertionError("nobody has asked")

        async with listening(application, words) as place:
            for said in (b"", b"GET /livez HTTP/1.1\r\nHost: "):
                reader, writer = await asyncio.open_connection(*place)
                writer.write(said)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), 60) == b""
                writer.close()
        assert words == ["silent", "silent"]

    asyncio.run(body())


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.floats(1, 100))
def test_bucket_never_lets_more_through_than_its_rate_and_one_burst(pauses: list[float], rate: float) -> None:
    now, taken = 0.0, 0
    allowance = Allowance(2 * rate, rate)
    for pause in pauses:
        now += pause
        taken += allowance.take(1, now)
        assert taken <= 2 * rate + rate * now + 1e-6


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in ({"message_mib": 0}, {"connections": 0}, {"requests_per_second": 0.5}):
        with pytest.raises(ValueError, match=str(next(iter(wrong)))):
            SecuritySection(**wrong)
    for half in ({"cert": "a"}, {"client_cert": "a"}, {"client_ca": "a"}, {"client_crl": "a"}, {"key": "a"}):
        with pytest.raises(ValueError, match=r"go together|needs c"):
            msgspec.structs.replace(SecuritySection(), **half)


def test_whoever_takes_nothing_of_an_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a listener of the live feed that sleeps."""
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.3)

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True})

    async def body() -> None:
        words: list[str] = []
        async with listening(endless, words) as place:
            with socket.create_connection(place) as silent:
                silent.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                await until(lambda: words == ["unread"])

    asyncio.run(body())
