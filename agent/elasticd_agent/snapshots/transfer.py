"""Snapshots from agent to agent, and probes of links: a TLS stream for each, both ends known by certificates.

These are in the store. Who is not there is not spoken to, and nobody brings another node's snapshots. The
sender says what it has (a frame of JSON, its length in four bytes before it), the receiver answers whether it
has room; then come the bytes, and a second answer once all of them are kept. TLS sees to it that they arrive as
they were sent; that they are what the worker copied is for their reader to check, by the sum that they hold.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec
from elasticd_planner.spec.mesh import JobPlan

from elasticd.codec.decoding import LARGE, MessageDecoder, shown, version_refusal
from elasticd.codec.message import WIRE_VERSION, Message
from elasticd.codec.record_parts import MOST_BYTES
from elasticd.version import __version__
from elasticd.wire.snapshots import Held
from elasticd_agent.snapshots.port import STREAM_TIMEOUT_SECONDS, SnapshotPort, StreamFailed
from elasticd_agent.snapshots.store import NoRoom, Snapshot, SnapshotStore
from elasticd_agent.snapshots.tls import TlsIdentity

#: Bytes read and sent, or received and written, at once: they stay in the processor's cache meanwhile.
_CHUNK_BYTES = 1 << 20
#: Bytes of a frame: of a snapshot's plan, with which a record would be stored.
_LARGEST_FRAME = MOST_BYTES
_LENGTH = struct.Struct("!I")
#: Messages of which the shortest is a link's latency, and bytes of a probe at most.
_ECHOES = 8
_MOST_PROBED = 64 << 20
#: Bytes a second in the mean, below which a stream is given up: it would hold a thread, and memory for what it
#: is to bring.
SLOWEST = 1 << 20


class Request(Message, frozen=True, kw_only=True, tag="stream-request"):
    """Keep what is `held`, its bytes follow. The plan comes with the first rank's. Or, with nothing held, a
    probe of the link: `echoes` frames are to be answered, then so many bytes follow, and are answered."""

    largest = LARGE

    held: Held | None = None
    plan: JobPlan | None = None
    echoes: int = 0
    bytes: int = 0


class Answer(Message, frozen=True, kw_only=True, tag="stream-answer"):
    """`error` where it is not taken."""

    error: str = ""


_requests: MessageDecoder[Request] = MessageDecoder(Request, "another agent")
_answers: MessageDecoder[Answer] = MessageDecoder(Answer, "another agent")


class SnapshotServer(SnapshotPort):
    """Takes other agents' snapshots into `snapshots`, on a port of the kernel's choice at `address`. When it is
    closed, streams under way break, and what they brought is dropped.

    `peers` gives the certificates that may come now, by their nodes; `arrived` is called in a thread with each
    snapshot that is kept here now, and with those that it outdated.
    """

    def __init__(
        self,
        address: str,
        identity: TlsIdentity,
        snapshots: SnapshotStore,
        peers: Callable[[], Mapping[str, str]],
        arrived: Callable[[Held, list[Snapshot]], None],
    ) -> None:
        self._snapshots, self._arrived = snapshots, arrived
        super().__init__(address, identity, peers, self._take)

    def _take(self, stream: ssl.SSLSocket, nodes: Collection[str]) -> None:
        request = _requests.one(_read_frame(stream))
        if request is None:
            _send_frame(stream, Answer(error=f"elasticd {__version__} does not know this request"))
            return
        if refusal := version_refusal("the other agent's request", request.version, WIRE_VERSION):
            _send_frame(stream, Answer(error=refusal))
            return
        held = request.held
        if held is None:
            _echo(stream, request)
            return
        if held.node not in nodes or not held.device.startswith(f"{held.node}/"):
            theirs = " or ".join(sorted(nodes))
            objection = f"{shown(held.device)} of node {shown(held.node)} is none of node {theirs}'s"
            _send_frame(stream, Answer(error=objection))
            return
        try:
            fd = self._snapshots.reserve(held.size)
        except NoRoom as error:
            _send_frame(stream, Answer(error=str(error)))
            return
        try:
            _send_frame(stream, Answer())  # its bytes may come
            _receive_into(stream, fd, held.size)
        except BaseException:
            os.close(fd)
            raise
        else:
            gone = self._snapshots.put(Snapshot(held=held, fd=fd, plan=request.plan))
        finally:
            self._snapshots.release(held.size)
        self._arrived(held, gone)
        _send_frame(stream, Answer())


class SnapshotSender:
    """Sends snapshots to other agents; thread-safe."""

    def __init__(self, identity: TlsIdentity) -> None:
        self._identity, self._lock, self._closed = identity, threading.Lock(), False
        self._open: set[socket.socket] = set()  # those that threads are at work on

    def send(self, snapshot: Snapshot, revoked: threading.Event, address: str, certificate: str) -> None:
        """Returns when the agent at `address` ("host:port"), known by `certificate`, holds the snapshot. Raises
        StreamFailed, also when the snapshot was revoked meanwhile."""
        with self._stream(address, certificate) as stream:
            _send(stream, snapshot, revoked)

    def cross(self, address: str, certificate: str, size: int) -> tuple[float, float]:
        """Seconds that `size` bytes take to the agent at `address`, and those of the shortest message, one way.
        Raises StreamFailed."""
        with self._stream(address, certificate) as stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _crossed(stream, size)

    @contextlib.contextmanager
    def _stream(self, address: str, certificate: str) -> Iterator[ssl.SSLSocket]:
        """Whatever breaks the stream is raised as StreamFailed."""
        host, _, port = address.rpartition(":")
        if self._closed:
            raise StreamFailed("this agent ends")
        try:
            plain = socket.create_connection((host, int(port)), timeout=STREAM_TIMEOUT_SECONDS)
            with self._opened(plain):
                context = self._identity.context(server=False, peers=certificate)
                with context.wrap_socket(plain) as stream:
                    yield stream
        except (OSError, ValueError, OverflowError) as error:
            raise StreamFailed(f"the agent at {address}: {error}") from error

    @contextlib.contextmanager
    def _opened(self, plain: socket.socket) -> Iterator[None]:
        """Closes the socket at the end. Raises StreamFailed once all are closed."""
        # wrap_socket takes the descriptor over: a duplicate still reaches the connection.
        with plain, socket.socket(fileno=os.dup(plain.fileno())) as handle:
            with self._lock:
                if self._closed:
                    raise StreamFailed("this agent ends")
                self._open.add(handle)
            try:
                yield
            finally:
                with self._lock:
                    self._open.discard(handle)

    def close(self) -> None:
        """Breaks off what is under way."""
        with self._lock:
            self._closed = True
            for handle in self._open:
                with contextlib.suppress(OSError):
                    handle.shutdown(socket.SHUT_RDWR)


class _Pace:
    """A stream's, from now on: it may be slow, but not so slow that it is none."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def after(self, done: int) -> None:
        """So many bytes have passed. Raises StreamFailed where that took too long."""
        seconds = time.monotonic() - self._began
        if seconds > STREAM_TIMEOUT_SECONDS + done / SLOWEST:
            raise StreamFailed(f"{done} bytes took {seconds:.0f} s: a stream is to bring {SLOWEST >> 20} MiB/s")


def _crossed(stream: ssl.SSLSocket, size: int) -> tuple[float, float]:
    _send_frame(stream, Request(echoes=_ECHOES, bytes=size))
    _check(_read_frame(stream))
    trips = []
    for _ in range(_ECHOES):
        began = time.perf_counter()
        _send_frame(stream, Answer())
        _check(_read_frame(stream))
        trips.append(time.perf_counter() - began)
    chunk, pace = bytes(min(size, _CHUNK_BYTES)), _Pace()
    began = time.perf_counter()
    for start in range(0, size, _CHUNK_BYTES):
        stream.sendall(chunk[: size - start])
        pace.after(start)
    _check(_read_frame(stream))
    latency = min(trips) / 2
    # The answer took its way back, which the bytes did not.
    return max(time.perf_counter() - began - latency, 1e-9), latency


def _echo(stream: ssl.SSLSocket, request: Request) -> None:
    """The other end of a probe."""
    if not (0 < request.echoes <= _ECHOES and 0 < request.bytes <= _MOST_PROBED):
        _send_frame(stream, Answer(error=f"a probe of {request.bytes} bytes is none"))
        return
    _send_frame(stream, Answer())
    for _ in range(request.echoes):
        _read_frame(stream)
        _send_frame(stream, Answer())
    left, buffer, pace = request.bytes, memoryview(bytearray(_CHUNK_BYTES)), _Pace()
    while left:
        count = stream.recv_into(buffer[: min(left, _CHUNK_BYTES)])
        if not count:
            raise StreamFailed("the other agent closed the stream")
        left -= count
        pace.after(request.bytes - left)
    _send_frame(stream, Answer())


def _send(stream: ssl.SSLSocket, snapshot: Snapshot, revoked: threading.Event) -> None:
    held = snapshot.held
    _send_frame(stream, Request(held=held, plan=snapshot.plan))
    _check(_read_frame(stream))
    buffer, pace = memoryview(bytearray(_CHUNK_BYTES)), _Pace()
    done = 0
    while done < held.size:
        count = os.preadv(snapshot.fd, [buffer[: held.size - done]], done)
        # Asked after the read: all that was read before is as the worker left it.
        if revoked.is_set():
            raise StreamFailed("the snapshot is not needed any more")
        if not count:
            raise StreamFailed(f"the memory file ends after {done} of {held.size} bytes")
        stream.sendall(buffer[:count])
        done += count
        pace.after(done)
    _check(_read_frame(stream))


def _check(frame: bytes) -> None:
    answer = _answers.one(frame)
    if answer is None:
        raise StreamFailed(f"elasticd {__version__} does not know its answer")
    if refusal := version_refusal("its answer", answer.version, WIRE_VERSION):
        raise StreamFailed(refusal)
    if answer.error:
        raise StreamFailed(answer.error)


def _send_frame(stream: ssl.SSLSocket, body: msgspec.Struct) -> None:
    data = msgspec.json.encode(body)
    stream.sendall(_LENGTH.pack(len(data)) + data)


def _read_frame(stream: ssl.SSLSocket) -> bytes:
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    if not 0 < length <= _LARGEST_FRAME:
        raise StreamFailed(f"a frame of {length} bytes: its sender does not speak elasticd's framing")
    return _read(stream, length)


def _read(stream: ssl.SSLSocket, size: int) -> bytes:
    data, pace = bytearray(), _Pace()
    while len(data) < size:
        part = stream.recv(min(size - len(data), _CHUNK_BYTES))
        if not part:
            raise StreamFailed("the other agent closed the stream")
        data += part
        pace.after(len(data))
    return bytes(data)


def _receive_into(stream: ssl.SSLSocket, fd: int, size: int) -> None:
    buffer, pace = memoryview(bytearray(_CHUNK_BYTES)), _Pace()
    done = 0
    while done < size:
        count = 0
        most = min(_CHUNK_BYTES, size - done)
        while count < most:  # TLS gives a record at a time, 16 KiB at most
            part = stream.recv_into(buffer[count:most])
            if not part:
                raise StreamFailed(f"the stream ended after {done + count} of {size} bytes")
            count += part
            pace.after(done + count)
        at = 0
        while at < count:
            at += os.pwrite(fd, buffer[at:count], done + at)
        done += count
