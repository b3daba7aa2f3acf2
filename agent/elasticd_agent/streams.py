"""Snapshots from agent to agent: a TLS stream of their own, each end known by the certificate in the store.

Every agent makes a key when it starts and publishes the certificate in its node's record; who is not in the
store is not spoken to. A request is a frame of JSON (its length, four bytes, before it), and so is the answer;
a put's bytes follow once it was answered, a get's follow the answer. The daemon starts no such stream yet.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import mmap
import os
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from elasticd.messages import Held
from elasticd_agent.vault import NoRoom, Snapshot, Vault, checksum

_CHUNK = 1 << 20
_LARGEST_FRAME = 64 << 20
_LENGTH = struct.Struct("!I")
#: Seconds without a byte after which a stream is given up.
_SILENCE = 10.0

_log = logging.getLogger(__name__)


class StreamFailed(OSError):
    """A snapshot did not get through; the message says why."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`put`: take this over, its bytes follow; else `held` names what is wanted."""

    put: bool
    held: Held
    sum: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`error` where it failed; a get's bytes follow, with their sum."""

    error: str = ""
    held: Held | None = None
    sum: int = 0


@dataclass(frozen=True, kw_only=True)
class Identity:
    """This agent's key and certificate, as long as it runs."""

    certificate: str
    key: bytes

    @classmethod
    def make(cls, node: str) -> Identity:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + 3650 * day)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = certificate.public_bytes(serialization.Encoding.PEM).decode()
        return cls(certificate=public, key=private)

    def context(self, *, server: bool, peers: str) -> ssl.SSLContext:
        """Trusts exactly the certificates in `peers` (PEM, one behind the other)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if peers:
            context.load_verify_locations(cadata=peers)
        with tempfile.TemporaryDirectory() as folder:  # ssl reads keys from files alone
            path = os.path.join(folder, "identity.pem")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(self.key + self.certificate.encode())
            context.load_cert_chain(path)
        return context


class Server:
    """Serves `vault` at `address` on a port of the kernel's choice; `peers` gives the certificates that may
    come now, `arrived` is called in a thread with each snapshot that was put here."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        vault: Vault,
        peers: Callable[[], str],
        arrived: Callable[[Held], None],
    ) -> None:
        self._identity, self._vault, self._peers, self._arrived = identity, vault, peers, arrived
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        self._streams: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="snapshots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in list(self._streams):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(stream,), name="snapshot", daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        self._streams.add(plain)
        plain.settimeout(_SILENCE)
        try:
            context = self._identity.context(server=True, peers=self._peers())
            with context.wrap_socket(plain, server_side=True) as stream:
                while not self._closed:
                    frame = _read_frame(stream)
                    if not frame:
                        return
                    self._answer(stream, msgspec.json.decode(frame, type=Request))
        except (OSError, msgspec.MsgspecError) as error:
            if not self._closed:
                _log.warning("a snapshot's stream broke: %s", error)
        finally:
            self._streams.discard(plain)
            plain.close()

    def _answer(self, stream: ssl.SSLSocket, request: Request) -> None:
        if request.put:
            self._take(stream, request)
            return
        wanted = request.held
        found = self._vault.find(wanted.job, wanted.device, wanted.step)
        if found is None:
            _send_frame(stream, Answer(error=f"no snapshot of {wanted.device} at step {wanted.step} is here"))
            return
        try:
            with found.map() as memory, memoryview(memory) as view:
                _send_frame(stream, Answer(held=found.held, sum=checksum(view)))
                stream.sendall(view)
        finally:
            os.close(found.fd)

    def _take(self, stream: ssl.SSLSocket, request: Request) -> None:
        held = request.held
        try:
            fd = self._vault.reserve(held.size)
        except NoRoom as error:
            _send_frame(stream, Answer(error=str(error)))
            return
        _send_frame(stream, Answer())  # its bytes may come
        try:
            _receive_into(stream, fd, held.size, request.sum)
        except OSError:
            os.close(fd)
            raise
        self._vault.put(Snapshot(held=held, fd=fd))
        _send_frame(stream, Answer())
        self._arrived(held)


class Client:
    """One stream to another agent, opened when it is first used and again after a break. Not thread-safe."""

    def __init__(self, host: str, port: int, identity: Identity, certificate: str) -> None:
        self._target, self._identity, self._certificate = (host, port), identity, certificate
        self._stream: ssl.SSLSocket | None = None

    def put(self, snapshot: Snapshot) -> None:
        """Sends a snapshot, and returns when the other agent holds it. Raises StreamFailed."""
        with snapshot.map() as memory, memoryview(memory) as view:
            request = Request(put=True, held=snapshot.held, sum=checksum(view))
            answer = self._ask(request, view)
        if answer.error:
            raise StreamFailed(answer.error)

    def get(self, wanted: Held) -> Snapshot:
        """Fetches a snapshot into a memory file of the caller's. Raises StreamFailed."""
        answer = self._ask(Request(put=False, held=wanted), None)
        if answer.error or answer.held is None:
            raise StreamFailed(answer.error or "an answer without a snapshot")
        assert self._stream is not None
        fd = os.memfd_create("elasticd-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, answer.held.size)
            _receive_into(self._stream, fd, answer.held.size, answer.sum)
        except OSError as error:
            os.close(fd)
            self.close()
            raise StreamFailed(str(error)) from error
        return Snapshot(held=answer.held, fd=fd)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _ask(self, request: Request, body: memoryview | None) -> Answer:
        try:
            if self._stream is None:
                self._stream = self._open()
            answer = self._exchange(self._stream, request)
            if body is not None and not answer.error:
                self._stream.sendall(body)
                answer = self._exchange(self._stream, None)
            return answer
        except (OSError, msgspec.MsgspecError) as error:
            why = str(error)
        self.close()  # outside the handler: what it holds of the body must be free
        raise StreamFailed(f"the agent at {self._target[0]}:{self._target[1]}: {why}")

    @staticmethod
    def _exchange(stream: ssl.SSLSocket, request: Request | None) -> Answer:
        if request is not None:
            _send_frame(stream, request)
        frame = _read_frame(stream)
        if not frame:
            raise ConnectionResetError("the other agent closed the stream")
        return msgspec.json.decode(frame, type=Answer)

    def _open(self) -> ssl.SSLSocket:
        context = self._identity.context(server=False, peers=self._certificate)
        plain = socket.create_connection(self._target, timeout=_SILENCE)
        try:
            return context.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise


def _send_frame(stream: ssl.SSLSocket, body: msgspec.Struct) -> None:
    data = msgspec.json.encode(body)
    stream.sendall(_LENGTH.pack(len(data)) + data)


def _read_frame(stream: ssl.SSLSocket) -> bytes:
    """A frame's body; empty at the end of the stream."""
    head = _read(stream, _LENGTH.size)
    if not head:
        return b""
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= _LARGEST_FRAME:
        raise StreamFailed(f"a frame of {length} bytes: its sender does not speak elasticd's framing")
    return _read(stream, length)


def _read(stream: ssl.SSLSocket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            if data:
                raise StreamFailed("the stream ended in the midst of a frame")
            return b""
        data += part
    return bytes(data)


def _receive_into(stream: ssl.SSLSocket, fd: int, size: int, expected: int) -> None:
    with mmap.mmap(fd, max(size, 1)) as memory, memoryview(memory) as view:
        done = 0
        while done < size:
            count = stream.recv_into(view[done : min(done + _CHUNK, size)])
            if not count:
                raise StreamFailed(f"the stream ended after {done} of {size} bytes")
            done += count
        found = checksum(view[:size])
    if found != expected:
        raise StreamFailed(f"{size} bytes arrived damaged")
