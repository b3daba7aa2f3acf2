"""`bound`: a TCP socket for a server of asyncio, whose connections send small messages at once."""

from __future__ import annotations

import socket


def bound(host: str, port: int) -> socket.socket:
    """A socket that has its port, and does not listen yet.

    It names its protocol: asyncio turns Nagle's algorithm off for connections of such sockets alone. With it a
    second message waits for the acknowledgement of the first, which a peer delays for 40 ms.

    Raises:
        OSError: the port is taken, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
