"""Who may speak to the agent: its own user, root, and the members of a group that the configuration names.

The mode of the socket's file says the same, and the kernel keeps to it. This asks the kernel once more, of each
connection: a file's mode may be changed by a careless `chmod`, and a socket be handed on by who may connect.
"""

from __future__ import annotations

import array
import grp
import os
import socket
import struct

from elasticd.packets import SocketTaken

#: pid, uid, gid (struct ucred).
_PEER = struct.Struct("3i")
#: linux/socket.h; Python has no name for it.
_SO_PEERGROUPS = 59
_MOST_GROUPS = 65536


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


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """The process, user and group that were at the other end when it connected; pid 0: of another namespace."""
    pid, uid, gid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid, gid


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
