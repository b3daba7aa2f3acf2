"""One disposable connection to one etcd endpoint: used until its first error, then thrown away.

The `etcd3` package neither authenticates again, nor resumes watches, nor leaves a frozen endpoint, and
its watcher spins while the server is down.  A session cures all of this by never outliving an error:
it opens a client on one endpoint, proves by a linearizable read that it is the right cluster and no
older than what was seen before, and answers calls with a deadline each.  The package gives us the
channel and the stubs; streams are opened here, because its own watcher thread cannot be ended.

`EtcdStore` decides when a session is opened and closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import msgspec

from elasticd.codec.decoding import skip
from elasticd.store import compat
from elasticd.store.protocol import (
    Identity,
    KeyValue,
    LeaseLost,
    Limits,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreReplaced,
    StoreTooLarge,
    StoreUnavailable,
    WatchCompacted,
    WatchEvent,
)

T = TypeVar("T")

#: Seconds that the refresh of a lease may take: a leader's lives for 2 s, and must outlast a frozen member.
KEEP_ALIVE_SECONDS = 0.7
_CHANNEL_OPTIONS = [
    # A thrown-away session must not share its successor's connection or back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    # A frozen member keeps its connections; only unanswered pings give it away to a quiet watch.
    # etcd ends connections that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 2000),
]


class EtcdOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options to reach an etcd: endpoints as "host:port" (a scheme is allowed), credentials, TLS files.

    `call_timeout` is the deadline of each call in seconds; after it the endpoint changes. `probe_key` is
    read to check a new connection: any key that the user's role may read, whether it exists or not. `limits`:
    a larger request is not sent.
    """

    endpoints: tuple[str, ...]
    user: str | None = None
    password: str | None = None
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    call_timeout: float = 2.0
    probe_key: str = "/elasticd/"
    limits: Limits = Limits()

    def __repr__(self) -> str:
        """Without the password: this may stand in a log."""
        return f"EtcdOptions(endpoints={self.endpoints}, user={self.user!r}, ca_cert={self.ca_cert!r})"

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("no etcd endpoint is given; name at least one, for example 127.0.0.1:2379")
        for endpoint in self.endpoints:
            split_endpoint(endpoint)
        if (self.user is None) != (self.password is None):
            raise ValueError("etcd's user and password go together; give both or neither")
        if (self.cert is None) != (self.key is None):
            raise ValueError("etcd's client certificate and key go together; give both or neither")
        if self.cert is not None and self.ca_cert is None:
            raise ValueError("a client certificate for etcd needs ca_cert too")
        if self.call_timeout <= 0:
            raise ValueError(f"call_timeout must be positive seconds, not {self.call_timeout}")


class Guard:
    """The newest state of the cluster that was seen: its id and highest revision. Thread-safe; refuses anything
    older."""

    def __init__(self, known: Identity | None = None) -> None:
        self._known = known
        self._lock = threading.Lock()

    def floor(self) -> int:
        """The revision that an answer must reach when its question is asked now."""
        with self._lock:
            return self._known.revision if self._known is not None else 0

    def check(self, endpoint: str, cluster_id: int, revision: int, floor: int) -> None:
        """Take note of an answer's header. Raises StoreReplaced for another or an older cluster."""
        with self._lock:
            known = self._known
            if known is not None and cluster_id != known.cluster_id:
                raise StoreReplaced(
                    f"etcd at {endpoint} is cluster {cluster_id:x}, but this daemon belongs to "
                    f"cluster {known.cluster_id:x}; point it at its own etcd, or remove its "
                    "state to adopt this one"
                )
            if revision < floor:
                raise StoreReplaced(
                    f"etcd at {endpoint} is at revision {revision}, but revision {floor} was seen before: it "
                    "was restored from an old copy; stop the daemons and remove their state to accept it"
                )
            highest = max(revision, known.revision if known is not None else 0)
            self._known = Identity(cluster_id=cluster_id, revision=highest)

    def seen(self, revision: int) -> None:
        """Take note of a watch's event, or of a lease's refresh: who only watches and keeps a lease learns by
        nothing else how far the store has come."""
        with self._lock:
            if self._known is not None and revision > self._known.revision:
                self._known = Identity(cluster_id=self._known.cluster_id, revision=revision)

    def known(self) -> Identity | None:
        """The cluster and its highest revision seen so far."""
        with self._lock:
            return self._known


class EtcdSession:
    """An open, checked connection. Every method raises a `StoreError` and never a gRPC error."""

    def __init__(self, options: EtcdOptions, endpoint: str, guard: Guard) -> None:
        self.endpoint = endpoint
        self._options = options
        self.guard = guard
        self._etcd3 = compat.load()
        self.rpc = self._etcd3.etcdrpc
        self._client = self._connect()
        self._metadata: tuple[tuple[str, str], ...] = ()
        try:
            self._authenticate()
            self.identify()
        except BaseException:
            self.close()
            raise

    def unary(self, stub: str, method: str, request: Any, *, linearizable: bool = False) -> Any:
        """One call and its answer. A linearizable one has its header checked by the guard."""
        floor = self.guard.floor()
        call = getattr(getattr(self._client, stub), method)
        answer = self.run(lambda: call(request, self._options.call_timeout, metadata=self._metadata))
        if linearizable:
            header = answer.header
            self.guard.check(self.endpoint, header.cluster_id, header.revision, floor)
        return answer

    def keep_alive(self, lease: int) -> int:
        """The lease's seconds after a refresh; 0 when it is gone."""
        request = iter([self.rpc.LeaseKeepAliveRequest(ID=lease)])
        floor = self.guard.floor()

        def first_answer() -> Any:
            patience = min(self._options.call_timeout, KEEP_ALIVE_SECONDS)
            answers = self._client.leasestub.LeaseKeepAlive(request, patience, metadata=self._metadata)
            try:
                return next(answers)
            except StopIteration:
                raise StoreUnavailable(f"etcd at {self.endpoint} ended a lease's refresh") from None
            finally:
                answers.cancel()

        answer = self.run(first_answer)
        if answer.header.revision < floor:
            # A member that lags says so too: only a linearizable read tells it from one that was restored.
            self.identify()
        self.guard.seen(answer.header.revision)  # of a member that went through all that led there
        return int(answer.TTL)

    def watch(self, prefix: str, revision: int) -> WatchStream:
        """A stream of the prefix's changes from `revision` on."""
        create = self.rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=prefix_end(prefix), start_revision=revision
        )
        request = self.rpc.WatchRequest(create_request=create)
        return WatchStream(self, request, self.rpc.WatchStub(self._client.channel), self._metadata)

    def close(self) -> None:
        """End the connection; streams on it end with StoreUnavailable. May be repeated."""
        self._client.close()

    def _connect(self) -> Any:
        host, port, secure = split_endpoint(self.endpoint)
        options = self._options
        if secure and options.ca_cert is None:
            raise StoreRefused(f"etcd at {self.endpoint} speaks TLS; name its ca_cert")
        try:
            return self._etcd3.Etcd3Client(
                host=host,
                port=port,
                ca_cert=options.ca_cert,
                cert_key=options.key,
                cert_cert=options.cert,
                timeout=options.call_timeout,
                grpc_options=_CHANNEL_OPTIONS,
            )
        except OSError as error:
            raise StoreRefused(f"a TLS file for etcd cannot be read: {error}") from error

    def _authenticate(self) -> None:
        if self._options.user is None:
            return
        request = self.rpc.AuthenticateRequest(name=self._options.user, password=self._options.password)
        auth = self.rpc.AuthStub(self._client.channel)
        try:
            answer = self.run(lambda: auth.Authenticate(request, self._options.call_timeout))
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StoreRefused(
                f"etcd at {self.endpoint} refused user {self._options.user!r}: {error}; check user and password"
            ) from error
        self._metadata = (("token", answer.token),)

    def identify(self) -> Identity:
        """The cluster's id and revision, checked by the guard."""
        # A linearizable read: only then does the header prove how far the whole cluster has come.
        request = self.rpc.RangeRequest(key=self._options.probe_key.encode(), count_only=True)
        answer = self.unary("kvstub", "Range", request, linearizable=True)
        return Identity(cluster_id=answer.header.cluster_id, revision=answer.header.revision)

    def run(self, call: Callable[[], T]) -> T:
        """Do something with the channel, its errors turned into ours."""
        try:
            return call()
        except grpc.RpcError as error:
            raise translate(error, self.endpoint) from error
        except ValueError as error:
            # grpc's way of saying that another thread has closed the channel.
            raise StoreUnavailable(f"the connection to etcd at {self.endpoint} was closed") from error


class WatchStream:
    """One watch on one session: iterate to get its batches, each a non-empty list in order."""

    def __init__(self, session: EtcdSession, request: Any, stub: Any, metadata: tuple[tuple[str, str], ...]):
        self._session = session
        self._request = request
        self._ended = threading.Event()
        # hasleader: a member that is cut off from its cluster ends the stream, instead of staying silent.
        self._call = session.run(
            lambda: stub.Watch(self._requests(), metadata=(*metadata, ("hasleader", "true")))
        )

    def __iter__(self) -> Iterator[list[WatchEvent]]:
        while True:
            answer = self._session.run(lambda: next(self._call, None))
            if answer is None:
                raise StoreUnavailable(f"etcd at {self._session.endpoint} ended a watch")
            if answer.compact_revision:
                raise WatchCompacted(answer.compact_revision)
            if answer.canceled:
                why = answer.cancel_reason or "no reason given"
                if "permission denied" in why:
                    at = self._session.endpoint
                    raise StoreRefused(f"etcd at {at} denies a watch ({why}); check user, password and role")
                raise StoreUnavailable(f"etcd at {self._session.endpoint} cancelled a watch: {why}")
            if answer.events:
                self._session.guard.seen(answer.events[-1].kv.mod_revision)
                events = [_event(event) for event in answer.events if is_text(event.kv)]
                if events:
                    yield events

    def cancel(self) -> None:
        """End the stream; whoever iterates gets StoreUnavailable."""
        self._ended.set()
        self._call.cancel()

    def _requests(self) -> Iterator[Any]:
        yield self._request
        self._ended.wait()


def split_endpoint(endpoint: str) -> tuple[str, int, bool]:
    """("127.0.0.1", 2379, False) of "http://127.0.0.1:2379" or "127.0.0.1:2379"; True for https."""
    scheme, _, rest = endpoint.rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if scheme not in ("", "http", "https") or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r} is not an etcd endpoint; write host:port, for example 127.0.0.1:2379")
    return host, int(port), scheme == "https"


def host_of(endpoint: str) -> str:
    """The host of an endpoint, as addresses are looked up: "::1" of "http://[::1]:2379"."""
    return split_endpoint(endpoint)[0].removeprefix("[").removesuffix("]")


def prefix_end(prefix: str) -> bytes:
    """The first key after all keys that begin with the prefix, as etcd's ranges need it."""
    # UTF-8 never holds the byte 0xff, so the last byte can always be incremented.
    encoded = prefix.encode()
    return encoded[:-1] + bytes([encoded[-1] + 1])


def is_text(item: Any) -> bool:
    """Returns True if etcd's message has a key that we can name. etcd takes any bytes, and others may write
    there."""
    try:
        item.key.decode()
    except UnicodeDecodeError:
        text = f"the store has the key {item.key[:80]!r}, which is no UTF-8: such keys are skipped; delete them"
        skip("key", ("key", "no UTF-8"), text)
        return False
    return True


def key_value(item: Any) -> KeyValue:
    """etcd's message as our value."""
    return KeyValue(
        key=item.key.decode(),
        value=item.value,
        create_revision=item.create_revision,
        mod_revision=item.mod_revision,
        version=item.version,
        lease=item.lease,
    )


#: What etcd, or gRPC for it, says of a request that is larger than it takes.
_TOO_LARGE = ("request is too large", "too many operations in txn request", "larger than max")
#: What etcd says at its quota (--quota-backend-bytes).
_FULL = "database space exceeded"
#: What etcd says of a login that it gave and does not take any more: the token ran out, or is of before etcd's
#: last start, or of before the last change of users and roles.
_TOKEN_EXPIRED = ("invalid auth token", "revision of auth store is old")
#: What etcd says of a user's name and password that it does not take, or does not ask for.
_LOGIN_REFUSED = ("authentication failed", "authentication is not enabled")


def translate(error: grpc.RpcError, endpoint: str) -> StoreError:
    """Translates a gRPC error: an outage, unless etcd plainly said otherwise. What it said counts, since etcd
    has one code for a request that is too large and for a token that is too old."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.NOT_FOUND and "lease not found" in details:
        return LeaseLost("the lease has expired or was revoked")
    if any(text in details for text in _TOO_LARGE):
        return StoreTooLarge(f"etcd at {endpoint} takes no request of this size: {details}")
    if _FULL in details:
        return StoreFull(
            f"etcd at {endpoint} is at its quota and takes no write ({details}): compact and defragment it, "
            "then run 'etcdctl alarm disarm'"
        )
    if code == grpc.StatusCode.UNAUTHENTICATED or any(text in details for text in _TOKEN_EXPIRED):
        return TokenExpired(f"etcd at {endpoint} wants us to authenticate anew")
    if code == grpc.StatusCode.PERMISSION_DENIED or "user name is empty" in details:
        return StoreRefused(f"etcd at {endpoint} denies access ({details}); check user, password and role")
    if any(text in details for text in _LOGIN_REFUSED):
        return StoreRefused(details)
    if "required revision has been compacted" in details:
        return RevisionCompacted(f"etcd at {endpoint} has compacted a revision")
    answer = details.splitlines()[0] if details else code.name
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        answer = "no answer in time"
    elif "onnection refused" in answer:
        answer = "nothing listens there (connection refused)"
    return StoreUnavailable(f"etcd at {endpoint} does not answer: {answer}")


class RevisionCompacted(StoreUnavailable):
    """The revision that a read asked for is gone; a newer one can be read."""


class TokenExpired(StoreUnavailable):
    """The login has run out; nothing was done, and a new session cures it."""


def _event(event: Any) -> WatchEvent:
    return WatchEvent(kind="delete" if event.type == event.DELETE else "put", item=key_value(event.kv))
