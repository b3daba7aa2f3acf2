"""The door of an agent's port: other agents come in, by their certificates, and nobody else takes up much.

Whoever reaches the port may connect to it. What strangers can take up is bounded:

    threads, descriptors   `MOST_STRANGERS` connections without a handshake; one of the address that has the
                           most of them makes way for the next. A node that is known has `MOST_OF_NODE` streams.
    time                   a handshake has `HANDSHAKE_SECONDS`
    processor              `FAILURES_A_SECOND` handshakes that fail; certificates are read when the peers change
    log                    one line a minute, with the number of connections that it stands for

Where this process has no descriptor or thread left, the door waits a moment and goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from elasticd.backoff import jittered
from elasticd.codec.decoding import log_once
from elasticd.system.logs import Seldom
from elasticd_agent.snapshots.tls import TlsIdentity

#: Connections that have not shown a certificate yet.
MOST_STRANGERS = 32
#: Streams of one node: an agent sends four snapshots at once, and probes a link.
MOST_OF_NODE = 16
#: Seconds that a handshake may take.
HANDSHAKE_SECONDS = 5.0
#: Handshakes that fail, by which strangers use the processor.
FAILURES_A_SECOND = 100.0
#: Seconds without a byte after which a stream is given up.
STREAM_TIMEOUT_SECONDS = 10.0
#: Seconds between looks for handshakes that take too long, and until the next try where nothing is left.
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.2
#: What the threads add to their niceness: encryption takes the time that training leaves. Not more: a thread
#: that never gets its turn while it has the interpreter's lock would hold up the agent.
_NICER = 10

_log = logging.getLogger(__name__)


class StreamFailed(OSError):
    """A stream between two agents broke, or was refused; the message says why."""


@dataclass(kw_only=True, eq=False, slots=True)
class _Guest:
    """A connection. `handle` reaches it from another thread, after `plain` was given to TLS; `nodes` are those
    whose certificate it showed."""

    plain: socket.socket
    handle: socket.socket
    address: str
    nodes: frozenset[str] = frozenset()
    since: float = field(default_factory=time.monotonic)

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            self.handle.shutdown(socket.SHUT_RDWR)


class Trust:
    """The trusted certificates: those that `peers` gives now, by node. Thread-safe."""

    def __init__(self, identity: TlsIdentity, peers: Callable[[], Mapping[str, str]]) -> None:
        self._identity, self._peers = identity, peers
        self._lock = threading.Lock()
        self._seen: dict[str, str] = {}
        self._context: ssl.SSLContext | None = None
        self._trusted: dict[str, bytes] = {}
        self._nodes: dict[bytes, frozenset[str]] = {}

    def current(self) -> tuple[ssl.SSLContext, Mapping[bytes, frozenset[str]]]:
        """The context for a handshake, and of each certificate (DER) whose it is. A certificate that a context
        has trusted once may pass its handshake later: only who is in the mapping is let in."""
        with self._lock:
            peers = dict(self._peers())
            if self._context is None or peers != self._seen:
                self._context = self._read(peers)
                self._seen = peers
            return self._context, self._nodes

    def _read(self, peers: Mapping[str, str]) -> ssl.SSLContext:
        """Adds what is new: reading a thousand certificates takes a fifth of a second. What is gone stays until
        it is more than half of all."""
        context = self._context
        wanted = set(peers.values())
        if context is None or len(wanted | self._trusted.keys()) > 2 * len(wanted) + MOST_STRANGERS:
            context, self._trusted = self._identity.context(server=True, peers=""), {}
        nodes: dict[bytes, set[str]] = {}
        for node, certificate in peers.items():
            der = self._trusted.get(certificate) or self._added(context, node, certificate)
            if der:
                nodes.setdefault(der, set()).add(node)
        self._nodes = {der: frozenset(names) for der, names in nodes.items()}
        return context

    def _added(self, context: ssl.SSLContext, node: str, certificate: str) -> bytes:
        """One that cannot be read is its own node's trouble."""
        try:
            der = ssl.PEM_cert_to_DER_cert(certificate)
            context.load_verify_locations(cadata=der)
        except (ValueError, ssl.SSLError) as error:
            log_once(
                ("certificate", node, certificate[-80:]),
                f"the certificate of node {node} in the store cannot be read, so that its snapshots are not "
                f"taken: {error}",
            )
            return b""
        self._trusted[certificate] = der
        return der


class SnapshotPort:
    """Listens at `address`, on a port of the kernel's choice. `serve` is called in a thread of its own with
    each stream of an agent that `peers` knows, and with the nodes that its certificate is of; it raises
    StreamFailed, or another OSError, when the stream breaks."""

    def __init__(
        self,
        address: str,
        identity: TlsIdentity,
        peers: Callable[[], Mapping[str, str]],
        serve: Callable[[ssl.SSLSocket, frozenset[str]], None],
    ) -> None:
        self._trust, self._serve = Trust(identity, peers), serve
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._guests: list[_Guest] = []  # the longest here first
        self._closed = threading.Event()
        self._debt = 0.0  # seconds that failed handshakes have cost, and the door is to rest
        self._full, self._strange, self._broken = Seldom(_log), Seldom(_log), Seldom(_log)
        self._thread = threading.Thread(target=self._accept, name="snapshots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Streams under way break."""
        self._closed.set()
        with self._changed:
            for guest in self._guests:
                guest.drop()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                # Strangers come by this thread alone: without one here there is nothing to look after.
                self._listener.settimeout(_LOOK_SECONDS if self._strangers() else None)
                plain, place = self._listener.accept()
            except TimeoutError:
                self._drop_late()
                continue
            except OSError as error:
                if not self._closed.is_set():
                    self._rest(error)
                continue
            self._drop_late()
            self._make_room()
            self._let_in(plain, str(place[0]))
            with self._changed:
                debt, self._debt = self._debt, 0.0
            if debt:
                self._closed.wait(min(debt, _LOOK_SECONDS))

    def _rest(self, error: BaseException) -> None:
        """This process has no descriptor, thread or memory left, or whoever connected is gone."""
        self._full.warn(f"the port for other nodes' snapshots took no connection, and goes on: {error}")
        with self._changed:
            self._drop_one()
        self._closed.wait(jittered(_PAUSE_SECONDS))

    def _strangers(self) -> list[_Guest]:
        with self._changed:
            return [guest for guest in self._guests if not guest.nodes]

    def _drop_late(self) -> None:
        now = time.monotonic()
        for guest in self._strangers():
            if now - guest.since > HANDSHAKE_SECONDS:
                guest.drop()

    def _make_room(self) -> None:
        with self._changed:
            while len(self._strangers()) >= MOST_STRANGERS and not self._closed.is_set():
                self._drop_one()
                self._changed.wait(jittered(_LOOK_SECONDS))

    def _drop_one(self) -> None:
        """The stranger that is here the longest, of the address that has the most of them."""
        if strangers := self._strangers():
            address = Counter(guest.address for guest in strangers).most_common(1)[0][0]
            next(guest for guest in strangers if guest.address == address).drop()

    def _let_in(self, plain: socket.socket, address: str) -> None:
        try:
            handle = socket.socket(fileno=os.dup(plain.fileno()))
        except OSError as error:
            plain.close()
            self._rest(error)
            return
        guest = _Guest(plain=plain, handle=handle, address=address)
        with self._changed:
            self._guests.append(guest)
        try:
            threading.Thread(target=self._receive, args=(guest,), name="snapshot", daemon=True).start()
        except RuntimeError as error:  # no further thread can be started
            self._leave(guest)
            self._rest(error)

    def _receive(self, guest: _Guest) -> None:
        yielding()
        try:
            guest.plain.settimeout(STREAM_TIMEOUT_SECONDS)
            context, known = self._trust.current()
            with context.wrap_socket(guest.plain, server_side=True) as stream:
                self._introduce(guest, known.get(stream.getpeercert(binary_form=True) or b"", frozenset()))
                self._serve(stream, guest.nodes)
        except (OSError, msgspec.MsgspecError) as error:
            self._failed(guest, error)
        except Exception:
            _log.exception("a stream from %s ended by an error of elasticd", guest.address)
        finally:
            self._leave(guest)

    def _introduce(self, guest: _Guest, nodes: frozenset[str]) -> None:
        if not nodes:
            raise StreamFailed("its certificate is no node's")
        with self._changed:
            if sum(bool(other.nodes & nodes) for other in self._guests) >= MOST_OF_NODE:
                raise StreamFailed(f"node {min(nodes)} has {MOST_OF_NODE} streams to this agent already")
            guest.nodes = nodes
            self._changed.notify_all()

    def _failed(self, guest: _Guest, error: BaseException) -> None:
        if self._closed.is_set():
            return
        if guest.nodes:
            self._broken.warn(f"what node {min(guest.nodes)} sent did not arrive: {error}")
            return
        with self._changed:
            self._debt += 1 / FAILURES_A_SECOND
        self._strange.warn(f"a connection from {guest.address} that was no other agent's was dropped: {error}")

    def _leave(self, guest: _Guest) -> None:
        with self._changed:
            self._guests.remove(guest)
            self._changed.notify_all()
        guest.plain.close()
        guest.handle.close()


def yielding() -> None:
    """The calling thread, and it alone, is nicer from here on (Linux counts niceness by thread)."""
    with contextlib.suppress(OSError):  # where that is not allowed it is as nice as the others
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))
