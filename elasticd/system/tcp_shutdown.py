"""The TCP connections of another process, shut from outside: what chaos does where no route can be changed."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from contextlib import suppress

_PIDFD_GETFD = 438


def shut(pidfd: int, chosen: Callable[[socket.socket], bool]) -> int:
    """Shuts a process's connections that are `chosen` (asked with each TCP socket); how many there were that we
    may touch."""
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
            if tcp and chosen(sock):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _descriptors(pidfd: int) -> list[int]:
    """The sockets of a process."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        pid = next((line.split()[1] for line in file if line.startswith("Pid:")), "")
    descriptors = []
    with suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                    descriptors.append(int(entry))
    return descriptors
