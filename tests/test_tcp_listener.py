"""Connections of a server's socket send small messages at once."""

from __future__ import annotations

import asyncio
import socket

import pytest

from elasticd.system.tcp_listener import bound


def test_its_connections_do_not_wait_for_acknowledgements() -> None:
    async def accepted() -> int:
        options: asyncio.Queue[int] = asyncio.Queue()

        async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            options.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(handle, sock=bound("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.close()
            return await asyncio.wait_for(options.get(), 30)

    assert asyncio.run(accepted())


def test_a_port_that_is_taken_is_an_error() -> None:
    with bound("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bound("127.0.0.1", first.getsockname()[1])
