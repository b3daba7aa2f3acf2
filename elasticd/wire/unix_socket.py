"""Messages over an agent's unix socket: one SOCK_SEQPACKET packet each, large ones in a memfd.

    listener = listen(path)                agent
    sock = connect(path)                   worker, torchrun
    send(sock, data); receive(sock)        both; None is the other's end
    send(sock, data, fd); accept(sock)     with a descriptor, which the receiver gets one of its own of

A packet keeps its borders, so there is nothing to reassemble. Above `LARGEST_PACKET_BYTES` the kernel would
refuse it sooner or later; then a sealed memory file travels in its place, which the receiver reads and closes.
A packet with descriptors begins with eight bytes, the size of the message in the memory file. That is the
first descriptor, and a second one is the sender's; where the size is 0, the message follows in the packet.
All functions work on blocking and on non-blocking sockets; the latter raise BlockingIOError as usual.
Standard library only: a trainer imports this.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from elasticd.backoff import jittered

#: Bytes; larger messages travel by memfd.
LARGEST_PACKET_BYTES = 64 * 1024
#: Bytes; a larger message is refused on both sides, for it is an error and not a message.
LARGEST_MESSAGE_BYTES = 32 << 20
#: Names the agent's socket for everything that runs on a node.
SOCKET_VARIABLE = "ELASTICD_SOCKET"
#: Where the agent of `systemd/elasticd-agent.service` listens.
SERVICE_PATH = "/run/elasticd/agent.sock"
#: Names the one device of a torchrun that `elasticd run` started, by its index on the node.
SLOT_VARIABLE = "ELASTICD_SLOT"
#: Names the devices of a torchrun in restart mode that `elasticd run` started, likewise: "2,3".
SLOTS_VARIABLE = "ELASTICD_SLOTS"
#: Names the torchrun in restart mode that a process descends from.
TORCHRUN_VARIABLE = "ELASTICD_TORCHRUN"
#: And the round that it was started in: its number, torchruns in it, and the least that there may be.
ROUND_VARIABLE = "ELASTICD_ROUND"

_SIZE = struct.Struct("=Q")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_LONGEST_PATH = 107
_RETRY_SECONDS = 0.05
#: Seconds without an agent after which whoever waits for one says so.
_SAID_SECONDS = 2.0
#: Seconds that an agent waits for another one that is taking a socket in the same folder.
_TURN_SECONDS = 5.0
#: pid, uid, gid (struct ucred).
_PEER = struct.Struct("3i")
_ABSENT = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR)


log = logging.getLogger(__name__)


class NoAgent(ConnectionError):
    """Nobody listens at the socket; the message says what to do."""


class SocketTaken(OSError):
    """The path cannot be listened at: a living agent or another file is there."""


class PacketError(OSError):
    """The other end sent what is no message of ours, or a message is too large."""


def default_path() -> str:
    """The agent's socket, for trainers and commands: `own_path`, or that of the node's service where nothing is
    at `own_path`."""
    path = own_path()
    if SOCKET_VARIABLE in os.environ or os.path.exists(path) or not os.path.exists(SERVICE_PATH):
        return path
    return SERVICE_PATH


def own_path() -> str:
    """`$ELASTICD_SOCKET`, else a path of this user's own: where an agent listens that nobody told otherwise."""
    if named := os.environ.get(SOCKET_VARIABLE):
        return named
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "elasticd", "agent.sock")
    return os.path.join(tempfile.gettempdir(), f"elasticd-{os.getuid()}", "agent.sock")


def listen(path: str, group: int | None = None) -> socket.socket:
    """A non-blocking listening socket at `path`, for this user alone, or for the members of `group` too. A dead
    agent's socket file is replaced.

    Raises SocketTaken with the remedy.
    """
    _check_length(path)
    _make_folder(Path(path).parent, group)
    if _squatted(path):
        raise SocketTaken(f"{_squatted(path)}; choose another --socket")
    with _turn(path):
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Before the bind, so that there is no moment at which others could connect.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(path)
            if group is not None:
                os.chown(path, -1, group)
                os.chmod(path, 0o660)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise SocketTaken(f"cannot listen at {path}: {error.strerror}; choose another --socket") from error
    listener.setblocking(False)
    return listener


def remove(path: str) -> None:
    """Removes the file of a socket at which nobody listens any more; that of a follower stays."""
    with contextlib.suppress(SocketTaken, FileNotFoundError), _turn(path):
        _remove_stale(path)


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """The process, user and group at the other end, by the kernel's word: of whoever connected, or of whoever
    listened there. pid 0: it is of another namespace."""
    pid, uid, gid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid, gid


def connect(path: str, timeout: float = 0.0) -> socket.socket:
    """A blocking connection to the agent at `path`, tried for `timeout` seconds (at least once).
    After two seconds it is logged that an agent is waited for, and then that it is there.

    Raises NoAgent, which says how to start one.
    """
    _check_length(path)
    if _squatted(path):
        raise NoAgent(f"{_squatted(path)}; set {SOCKET_VARIABLE} to your agent's socket")
    began = time.monotonic()
    deadline, silent = began + timeout, True
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(path)
            if stranger := _stranger(path, sock):
                sock.close()
                raise NoAgent(f"{stranger}; set {SOCKET_VARIABLE} to your agent's socket")
            if not silent:
                log.warning("the agent at %s is there", path)
            return sock
        except NoAgent:
            raise
        except OSError as error:
            sock.close()
            if error.errno not in _ABSENT:
                raise NoAgent(f"cannot reach the agent at {path}: {error.strerror}") from error
            if time.monotonic() >= deadline:
                raise NoAgent(
                    f"no agent listens at {path}: start one ('elasticd up' on one machine, elasticd-agent on a "
                    f"node of a cluster), or set {SOCKET_VARIABLE}"
                ) from None
        if silent and time.monotonic() - began > _SAID_SECONDS:
            silent = False
            log.warning("no agent listens at %s yet; it is waited for up to %.0f s", path, timeout)
        time.sleep(jittered(_RETRY_SECONDS))


def send(sock: socket.socket, data: bytes, fd: int | None = None) -> None:
    """Hand one message over, and a descriptor with it, which stays the caller's too.

    Raises BrokenPipeError when the other end is gone, ValueError for no bytes.
    """
    if not data:
        raise ValueError("an empty message cannot be told from the end of the connection")
    if len(data) > LARGEST_MESSAGE_BYTES:
        raise PacketError(f"a message of {len(data)} bytes is above the limit of {LARGEST_MESSAGE_BYTES}")
    if len(data) <= LARGEST_PACKET_BYTES:
        if fd is None:
            sock.send(data, socket.MSG_NOSIGNAL)
        else:
            _send_with(sock, [_SIZE.pack(0), data], [fd])
        return
    body = _filled_memfd(data)
    try:
        _send_with(sock, [_SIZE.pack(len(data))], [body] if fd is None else [body, fd])
    finally:
        os.close(body)


def receive(sock: socket.socket) -> bytes | None:
    """Returns the next message, or None at the end of the connection. Raises PacketError for what no `send`
    sent, and for a descriptor, which is closed."""
    data, fd = accept(sock)
    if fd is not None:
        os.close(fd)
        raise PacketError("a descriptor came with a message that has none")
    return data


def accept(sock: socket.socket, most: int = LARGEST_MESSAGE_BYTES) -> tuple[bytes | None, int | None]:
    """Returns the next message and the descriptor that came with it, which the caller closes. Both are None at
    the end of the connection. Raises PacketError for what no `send` sent, and for a message of more than `most`
    bytes, of which none is read."""
    try:
        data, ancillary, flags = _packet(sock)
    except ConnectionResetError:
        # The other end closed with messages of ours unread. The kernel says so once, before its last words.
        data, ancillary, flags = _packet(sock)
    fds = _descriptors(ancillary)
    descriptor: int | None = None
    try:
        too_long = len(data) > LARGEST_PACKET_BYTES + (_SIZE.size if fds else 0)
        if too_long or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > 2:
            why = "its sender does not speak elasticd's framing, or this process has no descriptor left"
            raise PacketError(f"a packet was cut short: {why}")
        if not fds:
            return data or None, None
        size = _SIZE.unpack(data[: _SIZE.size])[0] if len(data) >= _SIZE.size else -1
        if size == 0 and len(data) > _SIZE.size and len(fds) == 1:
            descriptor = fds[0]
            return data[_SIZE.size :], descriptor
        message = _read_memfd(fds[0], data, most)
        descriptor = fds[1] if len(fds) == 2 else None
        return message, descriptor
    finally:
        for fd in fds:
            if fd != descriptor:
                os.close(fd)


def _packet(sock: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
    return sock.recvmsg(
        LARGEST_PACKET_BYTES + _SIZE.size, socket.CMSG_SPACE(2 * struct.calcsize("i")), socket.MSG_CMSG_CLOEXEC
    )[:3]


def _send_with(sock: socket.socket, parts: list[bytes], fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    sock.sendmsg(parts, rights, socket.MSG_NOSIGNAL)


def _filled_memfd(data: bytes) -> int:
    fd = os.memfd_create("elasticd-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        # Sealed, so that the receiver may trust that it neither shrinks nor changes while it reads.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_memfd(fd: int, header: bytes, most: int) -> bytes:
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        sealed = False
    if not sealed or len(header) != _SIZE.size:
        raise PacketError("a descriptor came that is no sealed memory file: not elasticd's framing")
    (size,) = _SIZE.unpack(header)
    if not size > 0 or os.fstat(fd).st_size != size:
        raise PacketError(f"a memory file of {os.fstat(fd).st_size} bytes came where {size} were announced")
    if size > most:
        raise PacketError(f"a message of {size} bytes came, where {most} are the most")
    parts: list[bytes] = []
    at = 0
    while at < size:
        parts.append(os.pread(fd, size - at, at))
        at += len(parts[-1])
    return b"".join(parts)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _check_length(path: str) -> None:
    if not path or len(os.fsencode(path)) > _LONGEST_PATH:
        raise SocketTaken(
            f"the socket path {path!r} has {len(os.fsencode(path))} bytes, and a unix socket's has 1 to "
            f"{_LONGEST_PATH}: choose a shorter one with --socket or {SOCKET_VARIABLE}"
        )


def _squatted(path: str) -> str:
    """Why the default path cannot be trusted, or nothing: in a folder that all may write to, another user could
    make ours first and pass for our agent."""
    folder = os.path.join(tempfile.gettempdir(), f"elasticd-{os.getuid()}")
    if os.path.dirname(path) != folder:
        return ""
    try:
        status = os.lstat(folder)
    except OSError:
        return ""
    if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode):
        return ""
    return f"{folder} is not this user's folder: another one made it"


def _stranger(path: str, sock: socket.socket) -> str:
    """Why whoever listens there cannot be trusted, or nothing: he is told of the job, and is sent descriptors.
    An agent of another user is trusted where that user or root keeps the folder, and others cannot write there:
    nobody else can have made the socket."""
    _, uid, _ = peer(sock)
    if uid in (os.geteuid(), 0):
        return ""
    folder = os.stat(os.path.dirname(os.path.abspath(path)))
    if folder.st_uid in (uid, 0) and not folder.st_mode & stat.S_IWOTH:
        return ""
    return f"user {uid} listens at {path}, in a folder in which others than an agent's user can make files"


@contextlib.contextmanager
def _turn(path: str) -> Iterator[None]:
    """One process at a time looks whether a socket in this folder is stale, removes it, and makes its own: of
    two agents that start at once the second finds that the first listens. Raises SocketTaken."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SocketTaken(f"cannot open {folder}: {error.strerror}; choose another --socket") from error
    try:
        deadline = time.monotonic() + _TURN_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK or time.monotonic() >= deadline:
                    raise SocketTaken(
                        f"cannot lock {folder}: {error.strerror}; is another process starting there? Choose "
                        "another --socket"
                    ) from error
            time.sleep(jittered(_RETRY_SECONDS))
        yield
    finally:
        os.close(fd)


def _make_folder(folder: Path, group: int | None) -> None:
    try:
        if group is not None and not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
            os.chown(folder, -1, group)
            folder.chmod(0o750)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SocketTaken(
            f"cannot make {folder} for the socket: {error.strerror}; choose another --socket"
        ) from error


def _remove_stale(path: str) -> None:
    """Clear the way if nobody listens at `path` any more."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketTaken(f"{path} is a file and no socket: remove it, or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except BlockingIOError:
            pass  # as many wait there as may: it lives
        except OSError as error:
            if error.errno not in _ABSENT:
                raise SocketTaken(
                    f"cannot reach the agent at {path}: {error.strerror}; choose another --socket"
                ) from error
            os.unlink(path)
            return
    raise SocketTaken(
        f"another agent listens at {path}: stop it, or give this one its own --socket "
        f"and set {SOCKET_VARIABLE} to it for the trainers"
    )
