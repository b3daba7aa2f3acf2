"""Chaos on a node, by order of the leader: its workers' processes get signals, its agent loses its network.

A signal goes through the pidfd that the worker's connection holds: it reaches that process or none, never one
that got its number since. Who was frozen is remembered by its pidfd: it can be thawed when nobody else knows
it any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from elasticd.config.credentials import Credentials
from elasticd.config.tree import ConfigError
from elasticd.wire.coordinator import Harm
from elasticd_agent.chaos.cut_network import DataCuts
from elasticd_agent.chaos.cut_store import CuttableStore

_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}
#: Seconds for opening the connection on which the end of a cut is told, between pings, and for their answers.
_OPEN_SECONDS = 3.0
_PING_SECONDS = 2.0

_log = logging.getLogger(__name__)


class FaultInjector:
    """Carries the leader's `Harm` out. `pidfd` gives a copy of the descriptor of a device's worker, None
    without one; `devices` are the node's; `follow` tells the link where the leader is, None: nowhere. A cut
    ends when the leader says so, after its seconds, or with the leader that ordered it: nobody else could end
    it. One of the data network ends with this agent instead."""

    def __init__(
        self,
        node: str,
        allowed: bool,
        store: CuttableStore,
        pidfd: Callable[[str], int | None],
        follow: Callable[[str | None], None],
        *,
        known: Callable[[], Credentials] = Credentials,
        devices: Sequence[str] = (),
    ) -> None:
        self._node, self.allowed, self._store = node, allowed, store
        self._pidfd, self._follow, self._known = pidfd, follow, known
        self._url: str | None = None
        self._frozen: dict[str, list[int]] = {}
        self._cut: asyncio.Task[None] | None = None
        self._devices, self._data = devices, DataCuts()
        self._heals: dict[str, asyncio.TimerHandle] = {}

    def follow(self, url: str | None) -> None:
        """The leader is at `url`; while the node is cut, nobody is told."""
        self._url = url
        if self._cut is None:
            self._follow(url)

    def take(self, harm: Harm) -> None:
        """On the agent's loop."""
        if not self.allowed:
            _log.warning("the leader ordered %s: chaos is off here, [chaos] enabled = true allows it", harm.how)
        elif harm.how in ("cut-data", "heal-data"):
            self._take_data(harm)
        elif harm.how != "cut":
            self._signal(harm.how, harm.device)
        elif self._cut is None and self._url is not None:
            _log.warning("chaos: this agent is cut off from leader and store")
            self._cut = asyncio.create_task(self._stay_cut(self._url, harm.seconds), name="cut")

    async def close(self) -> None:
        """End a cut, and let everybody go on who stands still."""
        if self._cut is not None:
            self._cut.cancel()
            await asyncio.gather(self._cut, return_exceptions=True)
        for device in list(self._frozen):
            self._thaw(device)
        for timer in self._heals.values():
            timer.cancel()
        self._data.close()

    def _take_data(self, harm: Harm) -> None:
        if timer := self._heals.pop(harm.peer, None):
            timer.cancel()
        if harm.how == "heal-data":
            self._data.heal(harm.peer)
            return
        pidfds = [self._pidfd(device) for device in self._devices]
        self._data.cut(harm.peer, [pidfd for pidfd in pidfds if pidfd is not None])
        if harm.seconds:
            loop = asyncio.get_running_loop()
            self._heals[harm.peer] = loop.call_later(harm.seconds, self._data.heal, harm.peer)

    def _signal(self, how: str, device: str) -> None:
        if how == "thaw":
            self._thaw(device)
        pidfd = self._pidfd(device)
        if pidfd is None:
            _log.warning("chaos: %s has no worker to %s", device, how)
            return
        _log.warning("chaos: %s the worker of %s", how, device)
        _send(pidfd, _SIGNALS[how])
        if how == "freeze":
            self._frozen.setdefault(device, []).append(pidfd)
        else:
            os.close(pidfd)

    def _thaw(self, device: str) -> None:
        for pidfd in self._frozen.pop(device, []):
            _send(pidfd, signal.SIGCONT)
            os.close(pidfd)

    async def _stay_cut(self, url: str, seconds: float) -> None:
        self._store.cut()
        self._follow(None)
        address = f"{url.replace('http', 'ws', 1).rstrip('/')}/v1/chaos/cut/{self._node}"
        try:
            known = self._known()
            async with asyncio.timeout(seconds or None):
                async with connect(
                    address,
                    additional_headers=known.headers(),
                    ssl=known.context,
                    open_timeout=_OPEN_SECONDS,
                    ping_interval=_PING_SECONDS,
                    ping_timeout=_PING_SECONDS,
                    proxy=None,
                ) as connection:
                    await connection.wait_closed()
        except (TimeoutError, OSError, WebSocketException, ConfigError):
            pass
        finally:
            _log.warning("chaos: the cut is over")
            self._cut = None
            self._store.heal()
            self._follow(self._url)


def _send(pidfd: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(pidfd, number)
