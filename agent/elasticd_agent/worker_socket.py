"""The agent's end of the unix socket: which processes may connect, what they say, and when they end.

A client is a worker (its first message is `Hello`) or a torchrun (`Join`). Its process is of the agent's own
user, of root, or of a group that the configuration names. The mode of the socket's file says the same, and the
kernel keeps to it; `Admission` asks the kernel once more, of each connection: a file's mode may be changed by a
careless `chmod`, and a process that may connect may hand its socket on.

The kernel tells which process is at the other end, and a pidfd when that process ends: a death is seen at once
and cannot be mistaken for another process with the same number. What happens is emitted, on one event loop, as
the machine's events.
"""

from __future__ import annotations

import array
import asyncio
import errno
import grp
import logging
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from elasticd.codec.decoding import LARGE
from elasticd.codec.message import Message, encode
from elasticd.machines.agent.state import Ended, Event, Opened, Said
from elasticd.system import process_mark
from elasticd.system.logs import Seldom
from elasticd.version import __version__
from elasticd.wire import unix_socket
from elasticd.wire.launch import OfLaunch
from elasticd.wire.main_thread import Whereabouts
from elasticd.wire.rendezvous import Join, OfRounds
from elasticd.wire.snapshots import OfSnapshots
from elasticd.wire.unix_socket import SocketTaken, peer
from elasticd.wire.worker import (
    FromItsAgent,
    FromWorker,
    Hello,
    Pong,
    Rejected,
    ToAgentAlone,
    from_worker,
    passed_report,
)
from elasticd_agent.internal_errors import outlived

#: Seconds that a process has to end after it closed its connection, before it counts as gone without.
_LINGER_SECONDS = 2.0
#: Messages that may wait for a client that does not read; one that is further behind is cut off.
_MOST_WAITING = 1024
#: Clients at once: workers, torchruns, and those of them that have just ended; and those of one process, which
#: keeps no other from its agent by opening connections without end.
_MOST_CLIENTS, _MOST_OF_A_PROCESS = 1024, 256
#: Seconds in which a client must say its first message.
HELLO_SECONDS = 30.0
#: Seconds until the next try where this process has no descriptor or memory left for a client.
_PAUSE_SECONDS = 0.2
#: What the kernel says then.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
#: What it says of a client that is gone.
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
#: linux/socket.h; Python has no names for these.
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_MOST_GROUPS = 65536
#: What a kernel says for a process that has ended, by its release.
_ENDED = (errno.EINVAL, errno.ESRCH, errno.ENODATA)

_log = logging.getLogger(__name__)


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
    groups = array.array("I")
    try:
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS))
    except OSError:
        return []
    return list(groups)


def _number(group: str) -> int:
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise SocketTaken(
            f"[agent] group = {group!r} is no group of this machine: name one that 'getent group' shows"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerHandlers:
    """The parts of the agent that hear clients, on the running loop."""

    #: what the agent's machine is to know
    events: Callable[[Event], None]
    #: a worker's word of snapshots: the client's name, and the descriptor that came with it
    snapshots: Callable[[str, OfSnapshots, int | None], None]
    #: the name of a worker that answered a `Ping`
    pongs: Callable[[str], None]
    #: a client's name, its process id and a message, or None at its end; what this takes the machine does not
    #: hear
    rounds: Callable[[str, int, Message | None], bool]
    #: a worker's client name, and the memory that says where its main thread is
    whereabouts: Callable[[str, Whereabouts, int | None], None]
    #: a client's name, what it says of its launch, and the descriptor that came with it, which is the hearer's
    launches: Callable[[str, OfLaunch, int | None], None]
    #: the name of a client that is gone
    gone: Callable[[str], None]


class Workers:
    """Serves the socket at `path`, from `start` on."""

    _handlers: WorkerHandlers

    def __init__(self, path: str, node: str, group: str | None = None) -> None:
        self._admission = Admission(group)
        self._path = path
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._connections: dict[str, _Connection] = {}
        self._listener = unix_socket.listen(path, self._admission.group)
        self._full, self._strange = Seldom(_log), Seldom(_log)
        self._resting: asyncio.TimerHandle | None = None

    def start(self, handlers: WorkerHandlers) -> None:
        """Let in who connects; whoever came earlier has waited in the kernel's queue."""
        self._handlers = handlers
        self._loop.add_reader(self._listener, self._accept)

    def send(self, client: str, body: FromItsAgent, fd: int | None = None) -> None:
        """To a client, with a descriptor, which is closed here; what is for one that is gone is dropped."""
        if connection := self._connections.get(client):
            connection.send(encode(body), fd)
        else:
            _close(fd)

    def dismiss(self, client: str, reason: str) -> None:
        """Say no, and let go once that is said."""
        if connection := self._connections.get(client):
            connection.send(encode(Rejected(reason=reason)))
            connection.finish()

    def workers(self) -> dict[str, int]:
        """Of the workers that are connected, by name, the process ids."""
        return {name: c.worker for name, c in self._connections.items() if c.worker is not None}

    def pidfd(self, client: str) -> int | None:
        """A copy, the caller's to close, of the descriptor of a client's process; None where that has ended."""
        connection = self._connections.get(client)
        return connection.pidfd() if connection is not None else None

    def terminate(self, client: str, *, at_once: bool = False) -> None:
        """Sends SIGTERM to a client's process, if it runs; at_once: SIGKILL."""
        pidfd = self.pidfd(client)
        if pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL if at_once else signal.SIGTERM)
            os.close(pidfd)

    def close(self) -> None:
        """Stop serving and remove the socket file, if it still is ours. The processes are left alone."""
        self._loop.remove_reader(self._listener)
        if self._resting is not None:
            self._resting.cancel()
        self._listener.close()
        unix_socket.remove(self._path)
        for connection in list(self._connections.values()):
            connection.close()
        self._connections.clear()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(error)
                return
            sock.setblocking(False)
            if refusal := self._turn_away(sock):
                self._strange.warn(refusal)
                continue
            pid, _, _ = peer(sock)
            name = f"{self._node}:{pid}:{secrets.token_hex(4)}"
            try:
                pidfd = peer_pidfd(sock)
            except OSError as error:
                sock.close()
                self._rest(error)
                return
            connection = _Connection(name, pid, pidfd, sock, self._loop, self._handlers, self._forget)
            self._connections[name] = connection

    def _rest(self, error: OSError) -> None:
        """This process has no descriptor left: a connection that waits would wake this loop without end."""
        self._full.warn(f"the socket {self._path} took no connection, and goes on: {error}")
        self._loop.remove_reader(self._listener)
        self._resting = self._loop.call_later(
            _PAUSE_SECONDS, self._loop.add_reader, self._listener, self._accept
        )

    def _turn_away(self, sock: socket.socket) -> str:
        """Why, and it is told so; nothing for one that may stay."""
        refusal = self._admission.refusal(sock)
        if not refusal and len(self._connections) >= _MOST_CLIENTS:
            refusal = f"this agent has {_MOST_CLIENTS} clients already: processes open connections without end"
        pid, _, _ = peer(sock)  # 0: of another namespace, as those of all containers are
        if not refusal and pid and self._count_of(pid) >= _MOST_OF_A_PROCESS:
            refusal = f"process {pid} has {_MOST_OF_A_PROCESS} connections to this agent already"
        if refusal:
            with suppress(OSError):
                unix_socket.send(sock, encode(Rejected(reason=refusal)))
            sock.close()
        return refusal

    def _count_of(self, pid: int) -> int:
        return sum(connection.pid == pid for connection in self._connections.values())

    def _forget(self, name: str) -> None:
        self._connections.pop(name, None)


class _Connection:
    """One client: its socket, and the pidfd of its process."""

    def __init__(
        self,
        name: str,
        pid: int,
        pidfd: int | None,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        handlers: WorkerHandlers,
        forget: Callable[[str], None],
    ) -> None:
        self._name, self.pid, self._sock = name, pid, sock
        self._loop, self._handlers, self._forget = loop, handlers, forget
        self._opening: Message | None = None
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._finishing = False
        self._open, self._is_gone = True, False
        self._linger: asyncio.TimerHandle | None = None
        self._pidfd = pidfd
        self._silence = self._loop.call_later(HELLO_SECONDS, self._expect_hello)
        self._loop.add_reader(sock, self._readable)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._exited)

    def send(self, data: bytes, fd: int | None = None) -> None:
        if not self._open:
            _close(fd)
            return
        if len(self._waiting) >= _MOST_WAITING:
            _log.warning("%s does not read its messages: its connection is closed", self._name)
            _close(fd)
            self._end_of_stream()
            return
        self._waiting.append((data, fd))
        if len(self._waiting) == 1:
            self._flush()

    def finish(self) -> None:
        """Ends the connection once everything is sent."""
        self._finishing = True
        if not self._waiting:
            self._loop.call_soon(self._gone, "it was dismissed")

    @property
    def worker(self) -> int | None:
        """The process id of a worker that can be spoken to."""
        return self.pid if self._open and isinstance(self._opening, Hello) else None

    def pidfd(self) -> int | None:
        return os.dup(self._pidfd) if self._pidfd is not None else None

    def close(self) -> None:
        self._close_socket()
        if self._linger is not None:
            self._linger.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._forget(self._name)

    def _flush(self) -> None:
        if not self._open:
            return
        while self._waiting:
            try:
                unix_socket.send(self._sock, *self._waiting[0])
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._loop.remove_writer(self._sock)
                    self._loop.call_later(_PAUSE_SECONDS, self._flush)
                    return
                if error.errno in _HUNG_UP:  # its end is seen when we read
                    self._drop_waiting()
                    break
                _log.error("a message to %s cannot be sent and is left out: %s", self._name, error)
            _close(self._waiting.popleft()[1])
        self._loop.remove_writer(self._sock)
        if self._finishing:
            self._loop.call_soon(self._gone, "it was dismissed")

    def _has_room(self) -> bool:
        """Returns whether this process can take two descriptors more, as many as a message may bring: the
        kernel drops those for which there is no room, and a message with them would be none of ours."""
        try:
            one = os.dup(self._sock.fileno())
        except OSError:
            return False
        try:
            os.close(os.dup(one))
        except OSError:
            return False
        finally:
            os.close(one)
        return True

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._sock, self._readable)

    def _readable(self) -> None:
        """One message for each wakeup, so that one client's flood does not keep the others waiting."""
        if not self._has_room():
            self._loop.remove_reader(self._sock)
            self._loop.call_later(_PAUSE_SECONDS, self._resume)
            return
        try:
            data, fd = unix_socket.accept(self._sock, LARGE)
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(str(error))
            return
        if data is None:
            self._end_of_stream()
            return
        report = passed_report(data) if isinstance(self._opening, Hello) else None
        try:
            body = report or from_worker(data, first=self._opening is None)
        except msgspec.MsgspecError as error:
            _close(fd)
            self._refuse(f"the agent does not understand this message ({error}): use one release everywhere")
            return
        if body is None:
            _close(fd)
            if self._opening is None:
                self._refuse("the agent does not know its first message: use one release everywhere")
            return
        try:
            self._on_message(body, fd)
        except Exception as error:
            what = f"{type(body).__name__ if report is None else 'Report'} of a client"
            why = outlived(what, error)
            if self._opening is None or isinstance(body, Hello | Join):  # it waits for an answer
                self._refuse(f"elasticd failed on {what} ({why}): please report it with the agent's log")

    def _on_message(self, body: FromWorker | ToAgentAlone | msgspec.Raw, fd: int | None) -> None:
        """One message, with the descriptor that came with it; a worker's report may be undecoded."""
        HANDLERS.get(type(body), _Connection.of_machine)(self, body, fd)

    def of_snapshots(self, body: OfSnapshots, fd: int | None) -> None:
        """About a snapshot of its state."""
        if self._opening is not None:
            self._handlers.snapshots(self._name, body, fd)
        else:
            self._refuse_first(body, fd)

    def of_main_thread(self, body: Whereabouts, fd: int | None) -> None:
        """The memory in which it says where its main thread is."""
        if isinstance(self._opening, Hello):
            self._handlers.whereabouts(self._name, body, fd)
        else:
            self._refuse_first(body, fd)

    def of_launch(self, body: OfLaunch, fd: int | None) -> None:
        """Of a launcher, about its workers' output and its job's events."""
        if self._opening is None:
            self._open_as(body)
        self._handlers.launches(self._name, body, fd)

    def report(self, body: msgspec.Raw, fd: int | None) -> None:
        """A worker's report, undecoded."""
        _close(fd)
        self._handlers.events(Said(client=self._name, body=body))

    def pong(self, body: Pong, fd: int | None) -> None:
        """The answer of its control thread."""
        _close(fd)
        self._handlers.pongs(self._name)

    def of_machine(self, body: FromWorker | OfRounds, fd: int | None) -> None:
        """For the agent's machine, or of a torchrun in restart mode."""
        _close(fd)
        if self._handlers.rounds(self._name, self.pid, body):
            if self._opening is None:
                self._open_as(body)
        elif isinstance(body, OfRounds):
            self._refuse(f"this agent takes no {type(body).__name__}")
        elif self._opening is not None:
            self._handlers.events(Said(client=self._name, body=body))
        elif isinstance(body, Hello | Join):
            self._open_as(body)
            incarnation = secrets.token_hex(4)
            self._handlers.events(Opened(client=self._name, body=body, pid=self.pid, incarnation=incarnation))
        else:
            self._refuse_first(body, None)

    def _open_as(self, body: FromWorker | ToAgentAlone) -> None:
        self._opening = body
        self._note_release(body)

    def _refuse_first(self, body: object, fd: int | None) -> None:
        _close(fd)
        self._refuse(f"the first message must be Hello or Join, not {type(body).__name__}")

    def _note_release(self, hello: object) -> None:
        release = getattr(hello, "release", __version__)
        if release != __version__:
            text = "%s is of elasticd %s, this agent of %s"
            _log.info(text, self._name, release or "an unknown release", __version__)

    def _refuse(self, reason: str) -> None:
        _log.warning("%s is cut off: %s", self._name, reason)
        self.send(encode(Rejected(reason=reason)))
        self._end_of_stream()

    def _end_of_stream(self) -> None:
        """The connection is over. A worker lives on as long as its process does, or a little while."""
        self._close_socket()
        if not isinstance(self._opening, Hello) or self._pidfd is None:
            self._gone("it closed its connection")
        elif self._linger is None:
            self._linger = self._loop.call_later(
                _LINGER_SECONDS, self._gone, "it closed its connection to the agent, but its process runs on"
            )

    def _exited(self) -> None:
        if self._pidfd is None:
            return
        if self._open and not self._has_room():  # for its last words
            self._loop.remove_reader(self._pidfd)
            self._loop.call_later(_PAUSE_SECONDS, self._exited)
            return
        if self._open:
            self._drain()
        self._gone("its process ended")

    def _drain(self) -> None:
        """Hear what it said before it ended: a goodbye, most of all."""
        while self._open and self._linger is None:
            before = self._sock.fileno()
            if not _has_data(self._sock):
                return
            self._readable()
            if self._sock.fileno() != before:
                return

    def _gone(self, how: str) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self.close()
        self._handlers.gone(self._name)
        try:
            of_rounds = self._handlers.rounds(self._name, self.pid, None)
        except Exception as error:
            outlived("the end of a client", error)
            of_rounds = False
        if not of_rounds and self._opening is not None:
            self._handlers.events(Ended(client=self._name, how=how))

    def _expect_hello(self) -> None:
        if self._opening is None:
            self._refuse(f"no first message came within {HELLO_SECONDS:g} s")

    def _close_socket(self) -> None:
        if self._open:
            self._open = False
            self._silence.cancel()
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._drop_waiting()

    def _drop_waiting(self) -> None:
        for _, fd in self._waiting:
            _close(fd)
        self._waiting.clear()


#: What a connection does with a message of each type, and with the descriptor that came with it; every other
#: type is for the machine.
HANDLERS: dict[type, Callable[[_Connection, Any, int | None], None]] = {
    **dict.fromkeys(get_args(OfSnapshots), _Connection.of_snapshots),
    **dict.fromkeys(get_args(OfLaunch), _Connection.of_launch),
    Whereabouts: _Connection.of_main_thread,
    msgspec.Raw: _Connection.report,
    Pong: _Connection.pong,
}


def _has_data(sock: socket.socket) -> bool:
    for _ in range(2):
        try:
            sock.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:
            continue  # it ended with messages of ours unread: its own are still there
        except OSError:
            return False
        return True
    return False


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
