"""The TCP sockets of this process, found by looking: gloo tells nobody which are its own."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator

#: Host and port.
Address = tuple[str, int]


def listeners() -> set[Address]:
    found = set()
    for _, listening, local, _, sock in tcp_sockets():
        sock.close()
        if listening:
            found.add(local)
    return found


def tcp_sockets() -> Iterator[tuple[int, bool, Address, Address | None, socket.socket]]:
    """(fd, listening, local, peer, a duplicate) of every TCP socket of this process. Working on a duplicate
    keeps a descriptor that is closed and used again meanwhile from fooling us. The caller closes it."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(entry))
        except OSError:
            continue
        try:
            if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
                os.close(duplicate)
                continue
            sock = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                sock.close()
                continue
            listening = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            local = sock.getsockname()[:2]
        except OSError:
            sock.close()
            continue
        try:
            peer = sock.getpeername()[:2]
        except OSError:
            peer = None
        yield int(entry), listening, local, peer, sock
