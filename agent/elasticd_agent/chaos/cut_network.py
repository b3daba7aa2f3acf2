"""Chaos on the data network of a node: what it sends to another one's data address goes nowhere.

With the right to change routes, a route swallows it in silence, until it is removed. Without, the connections
that this node's workers have to that address are shut, once: others can be made at once.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterable

from elasticd.system.tcp_shutdown import shut

_SECONDS = 5.0

_log = logging.getLogger(__name__)


class DataCuts:
    """The addresses that are cut off now."""

    def __init__(self) -> None:
        self._swallowed: set[str] = set()

    def cut(self, peer: str, pidfds: Iterable[int]) -> None:
        """Cuts `peer` off from this node, or shuts these processes' connections to it; the log says which."""
        pidfds = list(pidfds)
        try:
            why = _route("add", peer)
            if not why:
                self._swallowed.add(peer)
                _log.warning("chaos: what this node sends to %s is swallowed by a route", peer)
                return
            count = sum(shut(pidfd, lambda sock: sock.getpeername()[0] == peer) for pidfd in pidfds)
            text = "chaos: no route can be set here (%s): %d connections to %s were shut instead, once"
            _log.warning(text, why, count, peer)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)

    def heal(self, peer: str) -> None:
        """Removes the route to it, where there is one of ours."""
        if peer in self._swallowed:
            self._swallowed.discard(peer)
            why = _route("del", peer)
            _log.warning("chaos: %s is reached again%s", peer, f", but {why}" if why else "")

    def close(self) -> None:
        """Removes all routes that are ours."""
        for peer in list(self._swallowed):
            self.heal(peer)


def _route(verb: str, peer: str) -> str:
    """Why the route could not be changed, or nothing."""
    program = shutil.which("ip")
    if program is None:
        return "there is no `ip` command"
    family = "-6" if ":" in peer else "-4"
    command = [program, family, "route", verb, "blackhole", peer]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""
