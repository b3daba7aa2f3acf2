"""An etcd that speaks TLS, asks for a certificate, and for a user's password: as the configuration names it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elasticd_agent.registration import Registrar

from elasticd.config.tree import Config, ConfigError, parse
from elasticd.coordinator import election
from elasticd.coordinator.election import CannotLead
from elasticd.records import Keys
from elasticd.store.configured import etcd_options
from elasticd.store.etcd import EtcdStore
from elasticd.store.protocol import StoreError, StoreRefused
from elasticd.store.server import EtcdServer, free_ports
from elasticd.store.session import EtcdOptions, EtcdSession, Guard
from elasticd.testing.waiting import until
from tests.certificates import Authority
from tests.machines.cast import node_record

PASSWORD = "of-the-cluster-test"
WATCHED_SECONDS = 60.0


class SecureEtcd(EtcdServer):
    """At `secure` it speaks TLS and asks for a certificate; its health it tells in the clear."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        super().__init__(folder / "etcd", fsync=False)
        self._authority, self._pair = authority, authority.server("etcd")
        self.secure = f"https://127.0.0.1:{free_ports(1)[0]}"

    def _command(self) -> list[str]:
        command = super()._command()
        command[command.index("--listen-client-urls") + 1] += f",{self.secure}"
        return [
            *command,
            *("--cert-file", self._pair.cert, "--key-file", self._pair.key),
            *("--client-cert-auth", "--trusted-ca-file", self._authority.ca),
        ]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def etcd(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureEtcd]:
    with SecureEtcd(tmp_path_factory.mktemp("secure"), authority) as server:
        _give_users(server)
        yield server


def configured(etcd: SecureEtcd, authority: Authority, folder: Path, **changes: Any) -> Config:
    """A configuration in TOML, as a user writes it; None leaves a key away."""
    pair = authority.client("elasticd")
    secret = folder / "password"
    secret.touch(mode=0o600)
    secret.write_text(f"{PASSWORD}\n")
    values = {
        "endpoints": [etcd.secure],
        "ca": authority.ca,
        "cert": pair.cert,
        "key": pair.key,
        "user": "elasticd",
        "password_file": str(secret),
    } | changes
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items() if value]
    return parse("\n".join(['[cluster]\nname = "test"', "[etcd]", *lines]), "the test")


def test_cluster_works_over_tls_with_a_password_and_a_role_of_its_own(
    etcd: SecureEtcd, authority: Authority, tmp_path: Path
) -> None:
    store = election.connect(configured(etcd, authority, tmp_path))
    assert isinstance(store, EtcdStore)
    with_lease = store.grant(30)
    watch = store.watch("/elasticd/test/", 1)
    store.put("/elasticd/test/a", b"1", with_lease)
    event = watch.get(timeout=WATCHED_SECONDS)
    assert event is not None
    assert store.keep_alive(with_lease) > 0
    assert store.get("/elasticd/test/a") is not None
    with pytest.raises(StoreRefused, match="denies access"):
        store.put("/elasticd/other/a", b"1")
    store.revoke(with_lease)
    store.close()


def test_an_agents_own_role_holds_its_keys_and_gives_no_orders(
    etcd: SecureEtcd, authority: Authority, tmp_path: Path
) -> None:
    store = EtcdStore(etcd_options(configured(etcd, authority, tmp_path, user="agent")))
    keys, record = Keys(cluster="test"), node_record("alpha")
    registrar = Registrar(store, keys, record, 30, failed=lambda why: pytest.fail(why))
    registrar.claim()
    registrar.start()
    restarted = keys.rendezvous("restarted") + "torchruns/one"
    for key in (keys.member("job", "alpha/0"), restarted):
        registrar.hold(key, b"{}")
    until(lambda: store.get(keys.member("job", "alpha/0")) and store.get(restarted))
    watch = store.watch(keys.jobs, 1)
    assert watch.get(timeout=WATCHED_SECONDS) is not None
    for key in (
        keys.leader,
        keys.config,
        keys.schema,
        keys.job("job", "plan"),
        keys.job("job", "fence"),
        keys.rendezvous("another") + "state",
    ):
        with pytest.raises(StoreRefused, match="denies access"):
            store.put(key, b"1")
    registrar.close()
    assert store.get(keys.node("alpha")) is None
    store.close()


def test_a_watch_that_etcd_denies_is_said_once_and_not_taken_for_an_outage(
    etcd: SecureEtcd, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="elasticd.store.etcd")
    store = EtcdStore(etcd_options(configured(etcd, authority, tmp_path)))
    watch = store.watch("/elasticd/other/", 1)
    deadline = time.monotonic() + WATCHED_SECONDS
    while len(tries := [line for line in caplog.records if "denies a watch" in line.getMessage()]) < 3:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.02)
    assert [line.levelno for line in tries[:3]] == [logging.ERROR, logging.DEBUG, logging.DEBUG]
    assert "watch of /elasticd/other/" in tries[0].getMessage()
    watch.cancel()
    store.close()


def test_wrong_password_is_said_without_it(
    etcd: SecureEtcd, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(etcd, authority, tmp_path, password_file=None)
    monkeypatch.setenv("ELASTICD_ETCD_PASSWORD", "guessed-wrongly")
    with pytest.raises(CannotLead, match=r"refused user 'elasticd'.*check user and password") as error:
        election.connect(config)
    assert "guessed" not in str(error.value)
    monkeypatch.setenv("ELASTICD_ETCD_PASSWORD", PASSWORD)
    store = election.connect(config)
    store.close()


def test_strangers_do_not_get_through_the_handshake(
    etcd: SecureEtcd, authority: Authority, tmp_path: Path
) -> None:
    for changes in ({"cert": None, "key": None}, {"ca": Authority(tmp_path, "others").ca}):
        store = EtcdStore(etcd_options(configured(etcd, authority, tmp_path, **changes)))
        with pytest.raises(StoreError):
            store.identity()
        store.close()


def test_password_is_in_no_log_and_no_text_of_the_options(
    etcd: SecureEtcd, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = etcd_options(configured(etcd, authority, tmp_path))
    assert options.password == PASSWORD
    with caplog.at_level(logging.DEBUG):
        store = EtcdStore(options)
        store.identity()
        store.close()
    assert PASSWORD not in f"{options!r} {options} {caplog.text}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ca": None}, "speaks TLS: give ca"),
        ({"key": None}, "cert and key go together"),
        ({"ca": None, "endpoints": ["127.0.0.1:1"]}, "cert needs ca"),
        ({"user": None}, "password_file needs user"),
        ({"endpoints": ["http://127.0.0.1:1"]}, "speaks no TLS, but ca is given"),
    ],
)
def test_section_that_is_wrong_is_refused(
    etcd: SecureEtcd, authority: Authority, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(etcd, authority, tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"password_file": None}, r"\[etcd\] user = 'elasticd' has no password: name the file"),
        ({"password_file": "/nowhere"}, r"\[etcd\] password_file /nowhere cannot be read \(No such file"),
        ({"ca": "/nowhere"}, r"\[etcd\] ca = '/nowhere' cannot be read"),
    ],
)
def test_file_that_is_missing_is_named(
    etcd: SecureEtcd,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.delenv("ELASTICD_ETCD_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=said):
        etcd_options(configured(etcd, authority, tmp_path, **changes))


def test_secret_in_the_wrong_place_is_not_said_aloud() -> None:
    for text in ('[etcd]\npassword = "hush-hush"', '[security]\ntoken = "hush-hush"'):
        with pytest.raises(ConfigError) as error:
            parse(text, "f.toml")
        assert "hush" not in str(error.value)
        assert "did you mean" in str(error.value)


def _permission(rpc: Any, prefix: str, *, writes: bool) -> Any:
    start = f"/elasticd/test/{prefix}".encode()
    kind = rpc.Permission.READWRITE if writes else rpc.Permission.READ
    return rpc.Permission(permType=kind, key=start, range_end=start[:-1] + bytes([start[-1] + 1]))


def _give_users(server: EtcdServer) -> None:
    """root, and a user whose role may read and write one cluster's keys alone."""
    session = EtcdSession(EtcdOptions(endpoints=(server.endpoint,)), server.endpoint, Guard())
    rpc = session.rpc
    auth = rpc.AuthStub(session._client.channel)
    users = (("root", "root-of-tests", "root"), ("elasticd", PASSWORD, "ours"), ("agent", PASSWORD, "node"))
    for user, password, role in users:
        auth.UserAdd(rpc.AuthUserAddRequest(name=user, password=password), 5)
        auth.RoleAdd(rpc.AuthRoleAddRequest(name=role), 5)
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=user, role=role), 5)
    grants = [("ours", "", True), ("node", "", False)]  # as docs/security.md has them
    grants += [("node", prefix, True) for prefix in ("nodes/", "members/", "jobs/restarted/rendezvous/")]
    for role, prefix, writes in grants:
        perm = _permission(rpc, prefix, writes=writes)
        auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name=role, perm=perm), 5)
    auth.AuthEnable(rpc.AuthEnableRequest(), 5)
    session.close()
