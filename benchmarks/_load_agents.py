"""Agents for benchmarks/load.py: connections that greet, answer pings, and report, as cheaply as Python can.

    python benchmarks/_load_agents.py URL AGENTS DEVICES SECONDS spread|together|at-once [TOKEN CA]

Prints "connected", waits for a line, reports for so many seconds, prints how long reports waited in their
agents and how late its sends were, and ends.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import ssl
import struct
import sys
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from _load_job import Job, Template
from elasticd_agent.coordinator_link import gather_seconds
from elasticd_planner.spec.cluster import Node

from elasticd.wire.coordinator import ReportWindow, to_agent, together

_PING, _PONG, _TEXT, _BINARY, _CLOSE = 0x9, 0xA, 0x1, 0x2, 0x8
#: Shorter waits are left out: a thousand sends a second share the sleeps.
LEAST_SLEEP_SECONDS = 0.005
#: What a client's frames are masked with: zeros leave the bytes as they are.
_MASK = bytes(4)


def framed(payload: bytes, kind: int = _BINARY) -> bytes:
    """A client's frame (RFC 6455, 5.2)."""
    size = len(payload)
    if size < 126:
        return bytes((0x80 | kind, 0x80 | size)) + _MASK + payload
    if size < 1 << 16:
        return bytes((0x80 | kind, 0xFE)) + struct.pack("!H", size) + _MASK + payload
    return bytes((0x80 | kind, 0xFF)) + struct.pack("!Q", size) + _MASK + payload


class Agent(asyncio.Protocol):
    """One connection. gather_seconds: for which its reports wait, as the leader asked."""

    def __init__(self, host: str, token: str, node: Node, job: Job) -> None:
        self._host, self._token, self._node, self._job = host, token, node, job
        self.reports: list[Template] = job.reports(node)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone = ""
        self.gather_seconds, self._place = 0.0, random.random()
        self._buffer = b""
        self._upgraded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        head = [
            "GET /v1/agent HTTP/1.1",
            f"Host: {self._host}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
            *([f"Authorization: Bearer {self._token}"] if self._token else []),
        ]
        transport.write("\r\n".join([*head, "", ""]).encode())

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = self.gone or repr(error)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self.gone))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._upgraded:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 101 " not in head.split(b"\r\n", 1)[0] + b" ":
                self.gone = self._buffer.decode(errors="replace")
                self.transport.abort()
                return
            self._upgraded, self._buffer = True, rest
            self.transport.write(b"".join(map(framed, self._job.greetings(self._node))))
            self.ready.set_result(None)
        self._frames()

    def _frames(self) -> None:
        while len(self._buffer) >= 2:
            kind, size, at = self._buffer[0] & 0xF, self._buffer[1] & 0x7F, 2
            if size >= 126:
                at += 2 if size == 126 else 8
                if len(self._buffer) < at:
                    return
                size = int.from_bytes(self._buffer[2:at], "big")
            if len(self._buffer) < at + size:
                return
            payload, self._buffer = self._buffer[at : at + size], self._buffer[at + size :]
            if kind == _PING:
                self.transport.write(framed(payload, _PONG))
            elif kind in (_TEXT, _BINARY) and isinstance(window := to_agent(payload), ReportWindow):
                self.gather_seconds = gather_seconds(window, self._place)
            elif kind == _CLOSE:
                self.gone = f"closed by the coordinator: {payload[2:].decode(errors='replace')}"

    def report(self, step: int) -> None:
        now = time.monotonic()
        self.transport.write(framed(together([one.at(step, now) for one in self.reports])))


async def run(url: str, agents: int, devices: int, seconds: int, how: str, token: str, ca: str) -> None:
    job = Job(agents, devices)
    parts = urlsplit(url)
    assert parts.hostname is not None
    context = ssl.create_default_context(cafile=ca) if ca else None
    loop, all_agents = asyncio.get_running_loop(), []
    for node in job.nodes:
        _, agent = await loop.create_connection(
            lambda node=node: Agent(parts.netloc, token, node, job), parts.hostname, parts.port, ssl=context
        )
        all_agents.append(agent)
        await agent.ready
    print("connected", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    dues = {
        "spread": lambda n: n / len(all_agents),
        "together": lambda n: all_agents[n].gather_seconds,
        "at-once": lambda n: 0.0,
    }
    offsets = {all_agents[n]: dues[how](n) for n in range(len(all_agents))}
    late = await _reporting(offsets, seconds)
    waited = max(offsets.values()) if how == "together" else 0.0
    lost = [agent.gone for agent in all_agents if agent.gone]
    print(
        f"waited {waited:.3f} late {max(late):.3f} {sum(late) / len(late):.4f} lost {len(lost)} {lost[:1]}",
        flush=True,
    )
    await loop.run_in_executor(None, sys.stdin.readline)


async def _reporting(offsets: Mapping[Agent, float], seconds: int) -> list[float]:
    """Has each agent report once a second, at its offset.

    Returns:
        How late each send was, in seconds: what this program could not keep up with.
    """
    late, began = [], time.monotonic() + 0.2
    in_order = sorted(offsets, key=offsets.__getitem__)
    for step in range(seconds):
        for n, agent in enumerate(in_order):
            due = began + step + offsets[agent]
            if (wait := due - time.monotonic()) > LEAST_SLEEP_SECONDS:
                await asyncio.sleep(wait)
            elif n % 50 == 49:
                await asyncio.sleep(0)
            late.append(max(0.0, time.monotonic() - due))
            agent.report(step + 1)
    return late


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(run(given[0], int(given[1]), int(given[2]), int(given[3]), given[4], *(given[5:7] or ["", ""])))
