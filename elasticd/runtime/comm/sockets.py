"""Finds the TCP sockets of this process in /proc, because gloo does not say which are its own."""

from __future__ import annotations

import array
import fcntl
import os
import re
import socket
import termios
import time
from collections.abc import Iterator, Sequence

#: Host and port.
Address = tuple[str, int]

#: Seconds without a byte in a connection's queues after which nothing moves in it.
_QUIET_SECONDS = 0.01

_POLLED_INODE = re.compile(r"^tfd:.* ino:([0-9a-f]+)", re.MULTILINE)


def listeners() -> dict[int, Address]:
    """The addresses at which this process listens, by the socket's inode, which is unique while it is open."""
    found = {}
    for _, listening, local, _, sock in tcp_sockets():
        with sock:
            if listening:
                found[os.fstat(sock.fileno()).st_ino] = local
    return found


def polled() -> set[int]:
    """The inodes of all files that an epoll of this process waits for."""
    found: set[int] = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{entry}") as file:
                    found.update(int(inode, 16) for inode in _POLLED_INODE.findall(file.read()))
        except OSError:  # closed meanwhile
            continue
    return found


def tcp_sockets() -> Iterator[tuple[int, bool, Address, Address | None, socket.socket]]:
    """Every TCP socket of this process.

    Yields:
        (descriptor, whether it listens, local address, peer's address or None, a duplicate of the socket). The
        duplicate stays the same socket if the descriptor is closed and used again meanwhile. Close it.
    """
    for entry in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(entry))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=duplicate)
        except OSError:  # it is no socket
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


def wait_until_quiet(socks: Sequence[socket.socket], seconds: float) -> None:
    """Waits until these connections have had no byte in their queues for 10 ms.

    Args:
        socks: the connections.
        seconds: the longest wait.
    """
    deadline = time.monotonic() + seconds
    quiet_since = time.monotonic()
    while socks and quiet_since + _QUIET_SECONDS > (now := time.monotonic()) and now < deadline:
        if any(_under_way(sock) for sock in socks):
            quiet_since = time.monotonic()
        time.sleep(0.001)


def _under_way(sock: socket.socket) -> int:
    """Bytes that the peer has not acknowledged, and bytes that nobody has read here."""
    total = 0
    for queue in (termios.TIOCOUTQ, termios.FIONREAD):
        count = array.array("i", [0])
        try:
            fcntl.ioctl(sock, queue, count)
        except OSError:  # it is gone
            continue
        total += count[0]
    return total
