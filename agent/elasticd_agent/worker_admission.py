"""Who may speak to the agent: its own user, root, and the members of a group that the configuration names.

The mode of the socket's file says the same, and the kernel keeps to it. This asks the kernel once more, of each
connection: a file's mode may be changed by a careless `chmod`, and a socket be handed on by who may connect.
"""

from __future__ import annotations

import array
import errno
import grp
import os
import socket
import time

from elasticd.system import process_mark
from elasticd.wire.unix_socket import SocketTaken, peer

#: linux/socket.h; Python has no names for these.
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_MOST_GROUPS = 65536
#: What a kernel says for a process that has ended, by its release.
_ENDED = (errno.EINVAL, errno.ESRCH, errno.ENODATA)


class Admission:
    """Judges connections to a unix socket. `group`: by name or number, None for nobody but the owner. Raises
    SocketTaken for a group that does not exist."""

    def __init__(self, group: str | None) -> None:
        self.group = _number(group) if group else None

    def refusal(self, sock: socket.socket) -> str:
        """Why whoever connected may not stay, or nothing."""
        pid, uid, gid = peer(sock)
        if uid in (os.geteuid(), 0):
            return ""
        if self.group is not None and (gid == self.group or self.group in _groups(sock)):
            return ""
        who = "its group's members alone" if self.group is not None else "its owner alone: set [agent] group"
        return f"process {pid} of user {uid} may not speak to this agent, which is for {who}"


def peer_pidfd(sock: socket.socket) -> int | None:
    """A descriptor, the caller's, of the process that was at the other end when it connected. None when that
    belongs to another PID namespace, or has ended; Linux since 6.16 gives one then, too, which says so.
    Raises OSError where no descriptor is left.

    Its number alone could be another process' by now. Linux has known the process itself since 6.5; before, the
    number is looked up, and a process that started after we took the connection is not the one that made it.
    """
    pid, _, _ = peer(sock)
    if pid <= 0:
        return None
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in _ENDED:
            return None
        if error.errno != errno.ENOPROTOOPT:
            raise
    return _pidfd_of(pid, now)


def _pidfd_of(pid: int, before: float) -> int | None:
    """Of the process with this number that started before then (seconds since the machine did)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    marked = process_mark.mark(pid)  # what has this number now is what the descriptor is of, or is gone
    started = None if marked is None else int(marked.rpartition("-")[2]) / os.sysconf("SC_CLK_TCK")
    if started is None or started > before:
        os.close(pidfd)
        return None
    return pidfd


def _groups(sock: socket.socket) -> list[int]:
    """The other end's further groups; none where this kernel does not tell."""
    found = array.array("I")
    try:
        found.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS))
    except OSError:
        return []
    return list(found)


def _number(group: str) -> int:
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise SocketTaken(
            f"[agent] group = {group!r} is no group of this machine: name one that 'getent group' shows"
        ) from None
