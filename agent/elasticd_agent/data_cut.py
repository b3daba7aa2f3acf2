"""Chaos on the data network of a node: what it sends to another one's data address goes nowhere.

With the right to change routes, a route swallows it in silence, until it is removed. Without, the connections
that this node's workers have to that address are shut, once: others can be made at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress

_PIDFD_GETFD = 438
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
            count = sum(_shut(pidfd, peer) for pidfd in pidfds)
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


def _shut(pidfd: int, peer: str) -> int:
    """Shuts a process's connections to this address; how many there were that we may touch."""
    count = 0
    for fd in _descriptors(pidfd):
        ours = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, fd, 0)
        if ours < 0:  # closed meanwhile, or not ours to touch
            continue
        try:
            sock = socket.socket(fileno=ours)
        except OSError:
            os.close(ours)
            continue
        with sock, suppress(OSError):
            tcp = sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and sock.getpeername()[0] == peer:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _descriptors(pidfd: int) -> list[int]:
    """The sockets of a process."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        pid = next((line.split()[1] for line in file if line.startswith("Pid:")), "")
    found = []
    with suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                    found.append(int(entry))
    return found
