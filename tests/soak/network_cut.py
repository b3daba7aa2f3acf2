"""The data network between two nodes of a soak, cut for a while.

With namespaces a route of one node, or of both, swallows in silence what goes to the other's data address.
Without them the connections between the two nodes' workers are shut, once.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

from elasticd.chaos.faults import Fault
from elasticd.system.tcp_shutdown import shut
from elasticd.testing.network_namespaces import Namespaces


class NetworkCut:
    """The pairs of nodes that are apart now. `pids`: the workers of a node that live."""

    def __init__(self, spaces: Namespaces | None, pids: Callable[[str], Iterable[int]]) -> None:
        self._spaces, self._pids = spaces, pids
        self._until: dict[tuple[str, str], tuple[float, tuple[tuple[str, str], ...]]] = {}

    def __contains__(self, pair: object) -> bool:
        return pair in self._until

    def __bool__(self) -> bool:
        return bool(self._until)

    @property
    def nodes(self) -> set[str]:
        """Those that do not reach some other one."""
        return {node for pair in self._until for node in pair}

    def cut(self, fault: Fault) -> bool:
        """Returns True if anything was cut: workers that have no connection to each other lose none."""
        if self._spaces is None:
            return self._reset(fault.node, fault.peer)
        ways = [(fault.node, fault.peer), (fault.peer, fault.node)]
        ways = ways[:1] if fault.way == "out" else ways
        self._until[pair_of(fault)] = (time.monotonic() + fault.lasts, tuple(ways))
        for node, peer in ways:
            self._spaces.swallow(node, peer)
        return True

    def heal(self) -> None:
        """Those whose time is over."""
        for pair, (until, ways) in list(self._until.items()):
            if time.monotonic() >= until:
                assert self._spaces is not None
                for node, peer in ways:
                    with suppress(subprocess.CalledProcessError):
                        self._spaces.deliver(node, peer)
                del self._until[pair]

    def _reset(self, node: str, peer: str) -> bool:
        """All nodes are at one address: a connection's other end is known by its port."""
        ports: set[int] = set()
        for pid in self._pids(peer):
            with suppress(psutil.Error):
                ports |= {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.raddr}
        count = 0
        for pid in self._pids(node):
            with suppress(OSError):
                pidfd = os.pidfd_open(pid)
                try:
                    count += shut(pidfd, lambda sock: sock.getpeername()[1] in ports)
                finally:
                    os.close(pidfd)
        return count > 0


def pair_of(fault: Fault) -> tuple[str, str]:
    """The two nodes of a fault, in one order."""
    one, other = sorted((fault.node, fault.peer))
    return one, other
