"""Reachability of other nodes on the data network: a port that answers, and tries at those of others.

A TCP connection that is made proves both ways. Nothing is sent over it: whoever answers closes it. The port is
at the address where the node's workers listen for each other, so that it fails where they would.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

from elasticd.wire.coordinator import TryReach, Unreached

#: Seconds for a connection to be made: the kernel asks a second time after one.
TRY_SECONDS = 2.0
#: Connections that are tried at once.
MOST_AT_ONCE = 256


class PeerReachability:
    """On one event loop. `tell` takes the answers to the leader's orders."""

    def __init__(self, listens: str, tell: Callable[[Unreached], None]) -> None:
        family = socket.AF_INET6 if ":" in listens else socket.AF_INET
        self._socket = socket.create_server((listens, 0), family=family)
        self._tell = tell
        self._server: asyncio.Server | None = None
        self._tries: set[asyncio.Task[None]] = set()
        self.address = f"{listens}:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        """Answers from now on."""
        self._server = await asyncio.start_server(lambda _, writer: _end(writer), sock=self._socket)

    async def close(self) -> None:
        """Breaks off what is under way."""
        for attempt in self._tries:
            attempt.cancel()
        await asyncio.gather(*self._tries, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        self._socket.close()

    def take(self, order: TryReach) -> None:
        """Tries them all at once, and tells when that is done."""
        attempt = asyncio.create_task(self._try(order), name="try reach")
        self._tries.add(attempt)
        attempt.add_done_callback(self._tries.discard)

    async def _try(self, order: TryReach) -> None:
        self._tell(Unreached(job=order.job, round=order.round, nodes=await unreached(order.targets)))


async def unreached(targets: Mapping[str, str]) -> dict[str, str]:
    """Those of these nodes, by "host:port", to which no connection can be made; by node the reason."""
    slots = asyncio.Semaphore(MOST_AT_ONCE)
    reasons = await asyncio.gather(*(_reason(address, slots) for address in targets.values()))
    return {node: reason for node, reason in zip(targets, reasons, strict=True) if reason}


async def _reason(address: str, slots: asyncio.Semaphore) -> str:
    host, _, port = address.rpartition(":")
    async with slots:
        try:
            async with asyncio.timeout(TRY_SECONDS):
                _, writer = await asyncio.open_connection(host, int(port))
        except TimeoutError:
            return f"no answer from {address} within {TRY_SECONDS:g} s"
        except (OSError, ValueError, OverflowError) as error:
            return f"{address}: {error}"
        await _end(writer)
    return ""


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
