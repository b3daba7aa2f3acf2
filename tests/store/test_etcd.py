"""What only the etcd store has: endpoints, deadlines, credentials, and refusing another or older etcd."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import grpc
import pytest

from elasticd.codec import decoding
from elasticd.store import session as sessions
from elasticd.store.etcd import EtcdStore
from elasticd.store.protocol import (
    DeletePrefix,
    Identity,
    Limits,
    OutcomeUnknown,
    Put,
    StoreFull,
    StoreRefused,
    StoreTooLarge,
    StoreUnavailable,
    WatchEvent,
)
from elasticd.store.server import EtcdServer, find_etcd
from elasticd.store.session import EtcdOptions, EtcdSession, Guard, prefix_end, split_endpoint
from elasticd.testing.waiting import until

PATIENCE = 15.0


def store_on(*endpoints: str, **options) -> EtcdStore:
    known = options.pop("known", None)
    return EtcdStore(EtcdOptions(endpoints=endpoints, **options), known=known)


@pytest.fixture
def closed_port():
    # Bound but not listening: nobody else can take it, and connections are refused.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_an_etcd_that_is_not_there_is_named(closed_port):
    store = store_on(closed_port)
    with pytest.raises(StoreUnavailable, match=f"etcd at {closed_port} does not answer: nothing listens there"):
        store.identity()
    store.close()


def test_dead_endpoints_are_passed_over(etcd_server, closed_port):
    store = store_on(closed_port, etcd_server.endpoint)
    assert store.identity().revision >= 1
    store.close()


def test_a_silent_endpoint_costs_a_read_one_deadline_and_the_next_answers(etcd_server, lossy_proxy):
    store = store_on(lossy_proxy.endpoint, etcd_server.endpoint, call_timeout=2.0)
    watch = store.watch("/silent", store.put("/silent", b"1") + 1)
    lossy_proxy.swallow_answers()
    begun = time.monotonic()
    assert store.get("/silent").value == b"1"
    assert time.monotonic() - begun >= 2.0
    store.put("/silent", b"2")
    event = watch.get(timeout=PATIENCE)
    assert isinstance(event, WatchEvent)
    assert event.item.value == b"2"
    store.close()


def test_a_frozen_etcd_is_an_outage_that_ends_when_it_thaws():
    with EtcdServer(fsync=False) as frozen:
        store = store_on(frozen.endpoint, call_timeout=2.0)
        watch = store.watch("/a", store.put("/a", b"1") + 1)
        frozen.freeze()
        with pytest.raises(OutcomeUnknown, match="no answer in time"):
            store.put("/a", b"2")
        with pytest.raises(StoreUnavailable):
            store.get("/a")
        frozen.thaw()
        revision = store.put("/a", b"3")
        event = watch.get(timeout=PATIENCE)
        while isinstance(event, WatchEvent) and event.mod_revision < revision:
            event = watch.get(timeout=PATIENCE)
        assert isinstance(event, WatchEvent)
        assert event.item.value == b"3"
        store.close()


def test_a_role_that_may_read_only_our_prefix_is_enough(guarded_etcd):
    root = EtcdOptions(endpoints=(guarded_etcd.endpoint,), user="root", password="right")
    session = EtcdSession(root, guarded_etcd.endpoint, Guard())
    rpc, login = session.rpc, {"metadata": session._metadata}
    auth = rpc.AuthStub(session._client.channel)
    everything = rpc.Permission(permType=rpc.Permission.READWRITE, key=b"/elasticd/", range_end=b"/elasticd0")
    auth.UserAdd(rpc.AuthUserAddRequest(name="ours", password="p"), 5, **login)
    auth.RoleAdd(rpc.AuthRoleAddRequest(name="ours"), 5, **login)
    auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="ours", perm=everything), 5, **login)
    auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="ours", role="ours"), 5, **login)
    session.close()
    store = store_on(guarded_etcd.endpoint, user="ours", password="p")
    store.put("/elasticd/a", b"1")
    with pytest.raises(StoreRefused, match="denies access"):
        store.put("/other", b"1")
    store.close()


# -- sizes -----------------------------------------------------------------------------------------------------

#: Of an operator who has told nobody that etcd takes less than that.
ANYTHING = Limits(operations=1 << 20, request_bytes=1 << 30)


@pytest.mark.parametrize(
    ("ops", "says"),
    [
        ([Put(f"/sizes/{n}", b"") for n in range(200)], "too many operations in txn request"),
        ([Put("/sizes/a", b"x" * 1_700_000)], "request is too large"),
        ([Put("/sizes/a", b"x" * 4_000_000)], "larger than max"),
    ],
)
def test_what_etcd_itself_refuses_for_its_size_is_no_outage(etcd_server, ops, says):
    store = store_on(etcd_server.endpoint, limits=ANYTHING)
    store.identity()
    session = store._session
    with pytest.raises(StoreTooLarge, match=says):
        store.transact((), ops)
    assert store.snapshot("/sizes/").items == ()
    store.put("/sizes-after", b"")
    assert store._session is session
    store.close()


def test_a_prefix_is_read_in_pages_at_one_revision(etcd_server, monkeypatch):
    writer = store_on(etcd_server.endpoint)
    for n in range(40):
        writer.put(f"/pages/{n:02d}", b"x" * (40_000 if n in (7, 8, 9) else 1))
    before = writer.snapshot("/pages/")
    store = store_on(etcd_server.endpoint, limits=Limits(page_bytes=60_000, page_keys=8))
    pages = []

    def page(start, end, keys, revision):
        answer = EtcdStore._page(store, start, end, keys, revision)
        pages.append((len(answer.kvs), answer.ByteSize()))
        if len(pages) == 2:  # what others change from now on is not of this snapshot
            writer.put("/pages/05", b"changed")
            writer.put("/pages/39x", b"added")
            writer.delete("/pages/38")
        return answer

    monkeypatch.setattr(store, "_page", page)
    assert store.snapshot("/pages/") == before
    assert pages[1][1] > 60_000
    assert [count for count, _ in pages[:4]] == [8, 8, 5, 8], "the page after a large one has fewer keys"
    pages.clear()
    assert [item.key[-3:] for item in store.snapshot("/pages/").items[-2:]] == ["/39", "39x"]
    writer.close()
    store.close()


def test_a_prefix_whose_revision_is_compacted_between_two_pages_is_read_anew(etcd_server, monkeypatch):
    store = store_on(etcd_server.endpoint, limits=Limits(page_keys=2))
    for n in range(6):
        store.put(f"/compacted/{n}", b"")
    begun = []

    def page(start, end, keys, revision):
        answer = EtcdStore._page(store, start, end, keys, revision)
        begun.append(start)
        if len(begun) == 2:
            newest = store.put("/compacted/7", b"")
            session = store.open_session()
            session.unary("kvstub", "Compact", session.rpc.CompactionRequest(revision=newest))
        return answer

    monkeypatch.setattr(store, "_page", page)
    assert len(store.snapshot("/compacted/").items) == 7
    assert begun.count(b"/compacted/") == 2
    store.close()


class Said(grpc.RpcError):
    """What etcd answered."""

    def __init__(self, code, details):
        super().__init__()
        self.code, self.details = lambda: code, lambda: details


class Answers:
    """etcd's key-value calls, of which the next one is answered so."""

    def __init__(self, stub, error):
        self._stub, self._error = stub, error

    def __getattr__(self, name):
        if self._error is None:
            return getattr(self._stub, name)
        error, self._error = self._error, None

        def call(*_, **__):
            raise error

        return call


@pytest.mark.parametrize(
    ("code", "details", "settled"),
    [
        # Newer etcds say so to who logged in before users or roles were changed.
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", True),
        (grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token", True),
        (grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: not leader", False),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: what nobody has heard of yet", False),
    ],
)
def test_every_other_error_is_an_outage_that_a_new_session_may_end(etcd_server, code, details, settled):
    store = store_on(etcd_server.endpoint)
    store.identity()
    session = store._session
    session._client.kvstub = Answers(session._client.kvstub, Said(code, details))
    if settled:  # nothing was done, and the new session's login is good
        store.put("/old", b"1")
    else:
        with pytest.raises(OutcomeUnknown, match=details):
            store.put("/old", b"1")
        store.put("/old", b"1")
    assert store._session is not session
    store.close()


def test_an_etcd_at_its_quota_says_what_to_do_and_costs_no_session(tmp_path):
    """A session that is thrown away takes its watches with it, at each attempt of a write that waits."""
    program = tmp_path / "small-etcd"
    program.write_text(f'#!/bin/sh\nexec "{find_etcd()}" "$@" --quota-backend-bytes {2 << 20}\n')
    program.chmod(0o700)
    with EtcdServer(program=str(program), fsync=False) as server:
        store = store_on(server.endpoint)
        store.put("/before", b"1")
        session = store._session

        def fill() -> None:  # it looks at its size every 100 ms
            for number in range(2000):
                store.put(f"/large/{number}", b"x" * (64 << 10))

        with pytest.raises(StoreFull, match="etcdctl alarm disarm"):
            fill()

        def refuses(ask) -> bool:  # its alarm comes a moment after the first request that it had no room for
            try:
                ask()
            except StoreFull:
                return True
            return False

        until(lambda: refuses(lambda: store.grant(5)))
        refuses(lambda: store.delete("/nothing"))  # some releases of etcd delete still
        assert store.get("/before").value == b"1"
        assert store._session is session
        store.close()


def test_another_cluster_is_refused(etcd_server):
    store = store_on(etcd_server.endpoint)
    known = store.identity()
    store.close()
    other = store_on(etcd_server.endpoint, known=Identity(cluster_id=known.cluster_id ^ 1, revision=1))
    with pytest.raises(StoreRefused, match="point it at its own etcd"):
        other.identity()
    other.close()


def test_an_older_etcd_is_refused(etcd_server):
    store = store_on(etcd_server.endpoint)
    known = store.identity()
    store.close()
    later = Identity(cluster_id=known.cluster_id, revision=known.revision + 1000)
    older = store_on(etcd_server.endpoint, known=later)
    with pytest.raises(StoreRefused, match=f"revision {later.revision} was seen before"):
        older.put("/older", b"")
    older.close()


def test_an_etcd_that_comes_back_without_its_data_is_refused_and_its_watches_wait(tmp_path):
    server = EtcdServer(tmp_path / "one", fsync=False)
    store = None
    try:
        server.start()
        store = store_on(server.endpoint)
        for _ in range(3):
            revision = store.put("/a", b"1")
        watch = store.watch("/a", revision + 1)
        server.kill()
        (tmp_path / "one" / "data").rename(tmp_path / "kept")
        server.start()
        with pytest.raises(StoreRefused, match="revision 1, but revision 4 was seen"):
            store.get("/a")
        assert store.known().revision == revision
        server.kill()
        (tmp_path / "one" / "data").rename(tmp_path / "wiped")
        (tmp_path / "kept").rename(tmp_path / "one" / "data")
        server.start()
        store.put("/a", b"2")
        event = watch.get(timeout=PATIENCE)
        assert isinstance(event, WatchEvent)
        assert event.item.value == b"2"
    finally:
        if store is not None:
            store.close()
        server.close()


@pytest.fixture(scope="module")
def guarded_etcd():
    """An etcd with a root user whose password is 'right'."""
    with EtcdServer(fsync=False) as server:
        session = EtcdSession(EtcdOptions(endpoints=(server.endpoint,)), server.endpoint, Guard())
        auth, rpc = session.rpc.AuthStub(session._client.channel), session.rpc
        auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="right"), 5)
        auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"), 5)
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), 5)
        auth.AuthEnable(rpc.AuthEnableRequest(), 5)
        session.close()
        yield server


def test_the_right_password_is_let_in_for_calls_and_watches_and_again_after_a_restart(guarded_etcd):
    store = store_on(guarded_etcd.endpoint, user="root", password="right")
    watch = store.watch("/a", store.put("/a", b"1") + 1)
    guarded_etcd.restart()
    store.identity()
    store.put("/a", b"2")
    event = watch.get(timeout=PATIENCE)
    assert isinstance(event, WatchEvent)
    assert event.item.value == b"2"
    store.close()


@pytest.mark.parametrize("login", [{"user": "root", "password": "wrong"}, {}])
def test_wrong_or_missing_credentials_are_refused(guarded_etcd, login):
    store = store_on(guarded_etcd.endpoint, **login)
    with pytest.raises(StoreRefused, match="check user"):
        store.identity()
    store.close()


def test_a_quiet_watch_costs_little_with_and_without_its_server():
    with EtcdServer(fsync=False) as server:
        store = store_on(server.endpoint)
        for number in range(4):
            store.watch(f"/{number}/", store.identity().revision + 1)
        for _ in range(2):
            shares = []
            while min(shares, default=1.0) >= 0.10:  # others in this process may take their share of one
                assert len(shares) < 5, shares
                begun, cpu = time.monotonic(), time.process_time()
                while time.monotonic() - begun < 1.5:
                    store._tails[0].watch.get(timeout=0.5)
                shares.append((time.process_time() - cpu) / (time.monotonic() - begun))
            server.kill()
        store.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endpoints": ()}, "no etcd endpoint"),
        ({"endpoints": ("localhost",)}, "write host:port"),
        ({"endpoints": ("ftp://localhost:1",)}, "write host:port"),
        ({"endpoints": ("localhost:99999",)}, "write host:port"),
        ({"endpoints": ("h:1",), "user": "u"}, "user and password go together"),
        ({"endpoints": ("h:1",), "cert": "c"}, "certificate and key go together"),
        ({"endpoints": ("h:1",), "cert": "c", "key": "k"}, "needs ca_cert"),
        ({"endpoints": ("h:1",), "call_timeout": 0.0}, "positive seconds"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        EtcdOptions(**options)


def test_endpoints_may_carry_a_scheme():
    assert split_endpoint("127.0.0.1:2379") == ("127.0.0.1", 2379, False)
    assert split_endpoint("http://[::1]:2379/") == ("[::1]", 2379, False)
    assert split_endpoint("https://etcd.example:1") == ("etcd.example", 1, True)


def test_tls_without_its_authority_is_refused_with_the_remedy():
    store = store_on("https://127.0.0.1:1")
    with pytest.raises(StoreRefused, match="name its ca_cert"):
        store.identity()
    store.close()


@pytest.mark.parametrize("prefix", ["/a/", "a", "/ü", "/\U0010ffff"])
def test_a_prefix_ends_right_after_its_last_key(prefix):
    assert prefix.encode() < (prefix + "\U0010ffff" * 3).encode() < prefix_end(prefix)
    assert not prefix_end(prefix).startswith(prefix.encode())


def test_importing_the_protocol_and_the_store_in_memory_brings_no_grpc():
    script = "import sys, elasticd.store.memory, elasticd.store.leader; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_client_that_only_watches_knows_how_far_the_store_has_come(etcd_server):
    watcher, writer = EtcdStore(EtcdOptions(endpoints=(etcd_server.endpoint,))), None
    try:
        begin = watcher.identity().revision
        watch = watcher.watch("/seen/", begin + 1)
        writer = EtcdStore(EtcdOptions(endpoints=(etcd_server.endpoint,)))
        last = [writer.put("/seen/key", b"%d" % i) for i in range(3)][-1]
        events = [watch.get(timeout=30) for _ in range(3)]
        assert events[-1].mod_revision == last
        assert watcher.known().revision >= last
    finally:
        watcher.close()
        if writer is not None:
            writer.close()


def test_a_client_that_only_keeps_a_lease_knows_how_far_the_store_has_come(etcd_server):
    """As an agent whose prefixes are quiet: an etcd that comes back older than it was is known by that."""
    keeper, writer = (EtcdStore(EtcdOptions(endpoints=(etcd_server.endpoint,))) for _ in range(2))
    try:
        lease = keeper.grant(60)
        last = writer.put("/not watched/key", b"x")
        assert keeper.known().revision < last
        keeper.keep_alive(lease)
        assert keeper.known().revision >= last
        keeper.revoke(lease)
    finally:
        keeper.close()
        writer.close()


def test_a_key_that_is_no_text_is_skipped_in_a_prefix_and_in_a_watch(etcd_server, caplog):
    """It ended the thread of every watch that it came by, and each reading of a prefix with it."""

    def write(session):
        session.unary("kvstub", "Put", session.rpc.PutRequest(key=b"/bytes/\xff\xfe", value=b"x"))

    store = EtcdStore(EtcdOptions(endpoints=(etcd_server.endpoint,)))
    decoding._logged.clear()
    try:
        begin = store.put("/bytes/a", b"1")
        watch = store.watch("/bytes/", begin + 1)
        store._send(write)
        last = store.put("/bytes/b", b"2")
        event = watch.get(timeout=30)
        assert (event.key, event.mod_revision) == ("/bytes/b", last)
        assert [item.key for item in store.snapshot("/bytes/").items] == ["/bytes/a", "/bytes/b"]
        assert caplog.text.count("which is no UTF-8") == 1
    finally:
        store.transact((), (DeletePrefix("/bytes/"),))
        store.close()


def test_a_defect_does_not_end_the_thread_of_a_watch(etcd_server, caplog, monkeypatch):
    event, failed = sessions._event, []

    def failing(raw):
        if raw.kv.key.startswith(b"/defect/") and len(failed) < 2:  # another test's watch may live on a while
            failed.append(1)
            raise RuntimeError("a defect")
        return event(raw)

    monkeypatch.setattr(sessions, "_event", failing)
    store = EtcdStore(EtcdOptions(endpoints=(etcd_server.endpoint,)))
    try:
        watch = store.watch("/defect/", store.identity().revision + 1)
        revision = store.put("/defect/a", b"1")
        assert watch.get(timeout=30).mod_revision == revision
        assert caplog.text.count("elasticd failed on the watch") == 1
    finally:
        store.close()


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [("http://[::1]:2379", "::1"), ("[2001:db8::7]:2379", "2001:db8::7"), ("127.0.0.1:2379", "127.0.0.1")],
)
def test_host_of_an_endpoint_is_one_that_addresses_are_looked_up_by(endpoint: str, host: str) -> None:
    assert sessions.host_of(endpoint) == host
