"""`elasticd security`: what it makes starts a cluster with TLS and tokens, and is never overwritten."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import stat
from pathlib import Path

import httpx2
import pytest
from cryptography import x509

from elasticd.cli import security
from elasticd.config.tree import load
from elasticd.system.certificates import hosts_of, new_authority, signed
from elasticd.testing.waiting import until
from tests.cli.support import call, daemon, refused, until_answered
from tests.etcds import SharedEtcd


def test_what_init_makes_starts_a_cluster_with_tls_and_a_token_for_each_role(
    shared_etcd: SharedEtcd, tmp_path: Path
) -> None:
    folder = tmp_path / "security"
    done = call("security", "init", str(folder))
    assert done.exit_code == 0, done.output
    own = {
        "coordinator": '[coordinator]\nhost = "0.0.0.0"\nport = 0\n',  # refused without tokens
        "agent": f'[agent]\nnode = "n0"\nsocket = "{tmp_path}/a.sock"\ndevices = 1\n',
        "dashboard": f'[dashboard]\nhost = "0.0.0.0"\nport = 0\nhistory = "{tmp_path}/history.db"\n',
        "operator": "",
        "viewer": "",
    }
    common = (
        f'[cluster]\nname = "{shared_etcd.cluster("tls")}"\n[etcd]\nendpoints = ["{shared_etcd.endpoint}"]\n'
    )
    for name, text in own.items():
        file = folder / f"{name}.toml"
        file.write_text(file.read_text() + common + text)

    def named(role: str) -> tuple[str, str]:
        return "--config", str(folder / f"{role}.toml")

    with (
        daemon("elasticd", "coordinator", *named("coordinator"), log=tmp_path / "coordinator.log"),
        daemon("elasticd_agent", *named("agent"), log=tmp_path / "agent.log"),
        daemon("elasticd", "dashboard", *named("dashboard"), log=tmp_path / "dashboard.log"),
    ):
        until_answered("status", *named("viewer"), wanted="n0/0")
        leader = json.loads(call("status", "--json", *named("viewer")).stdout)["leader"]
        assert leader["url"].startswith(f"https://{socket.gethostname()}:")
        assert "it needs a token of operator" in refused("drain", "n0", *named("viewer"))
        assert call("pause", *named("operator")).exit_code == 0
        assert "operator" in call("config", "history", *named("operator")).stdout
        assert "role agent may not do this" in refused("status", *named("agent"))
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does, and Go
        log = tmp_path / "dashboard.log"
        pages = until(lambda: re.search(r"at https://\S+?:(\d+)$", log.read_text(), re.MULTILINE))
        for url in (f"https://localhost:{pages[1]}/api/viewer", f"{leader['url']}/livez"):
            answer = httpx2.get(url, verify=context, trust_env=False, timeout=60)
            assert answer.status_code == 200
            with pytest.raises(httpx2.ConnectError, match=r"(?i)verify"):
                httpx2.get(url, verify=ssl.create_default_context(), trust_env=False, timeout=60)


def test_only_the_owner_may_read_what_init_makes_and_no_secret_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "security"
    said = call("security", "init", str(folder), "--installed", "/etc/elasticd").output
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    tokens = {file.read_text().strip() for file in files if file.suffix == ".token"}
    assert len(tokens) == 3
    assert not any(token in said for token in tokens)
    for file in files:
        if file.suffix == ".toml":
            section = load(file).security
            paths = [value for value in vars_of(section) if isinstance(value, str)]
            assert paths
            for path in paths:
                assert path.startswith("/etc/elasticd/")
                assert (folder / Path(path).name).exists()
            assert str(folder / file.name) in said
    assert list(folder.parent.iterdir()) == [folder], "nothing is left beside it"


def vars_of(section: object) -> list[object]:
    return [getattr(section, name) for name in type(section).__struct_fields__]  # type: ignore[attr-defined]


def test_nothing_is_overwritten_and_an_empty_folder_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    assert "nothing in it is overwritten" in refused("security", "init", str(tmp_path))
    assert "nothing in it is overwritten" in refused("security", "init", str(tmp_path / "file"))
    assert "cannot be written" in refused("security", "init", str(tmp_path / "file" / "x"))
    (tmp_path / "empty").mkdir()
    assert call("security", "init", str(tmp_path / "empty")).exit_code == 0
    before = {file: file.read_bytes() for file in (tmp_path / "empty").iterdir()}
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    assert "nothing in it is overwritten" in refused("security", "init", str(tmp_path / "empty"))
    assert before == {file: file.read_bytes() for file in (tmp_path / "empty").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"file", "empty"}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    inode = os.stat(".").st_ino
    assert call("security", "init", ".").exit_code == 0
    assert os.stat(tmp_path / "here").st_ino == inode, "the folder that a shell stands in stays"
    assert f'ca = "{tmp_path}/here/ca.pem"' in Path("agent.toml").read_text()


@pytest.mark.parametrize("name", ["new", "empty"])
def test_a_start_that_fails_in_the_middle_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()

    def fails(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(security, "_section", fails)
    assert "cannot be written: No space left on device" in refused("security", "init", str(tmp_path / name))
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_renewed_certificates_are_by_the_same_authority_for_the_same_hosts_and_tokens_stay(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "security"
    assert call("security", "init", str(folder), "--host", "c0.example", "--host", "10.1.2.3").exit_code == 0
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    hosts = ("c0.example", "10.1.2.3", "localhost", "127.0.0.1", "::1")
    assert hosts_of(before["coordinator.pem"]) == hosts
    assert call("security", "renew", str(folder)).exit_code == 0
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {f"{name}.{kind}" for name in ("coordinator", "dashboard") for kind in ("pem", "key")}
    assert hosts_of(after["dashboard.pem"]) == hosts
    authority = x509.load_pem_x509_certificate(after["ca.pem"])
    for name in ("coordinator.pem", "dashboard.pem"):
        x509.load_pem_x509_certificate(after[name]).verify_directly_issued_by(authority)
    assert call("security", "renew", str(folder), "--host", "c1.example").exit_code == 0
    assert hosts_of((folder / "coordinator.pem").read_bytes())[0] == "c1.example"


@pytest.mark.parametrize("host", ["", "a b", "https://c0", "c0/x", "ü.example", "x" * 300])
def test_a_host_that_is_none_is_refused_and_makes_nothing(host: str, tmp_path: Path) -> None:
    assert "must be a host's name or an address" in refused(
        "security", "init", str(tmp_path / "x"), "--host", host
    )
    assert list(tmp_path.iterdir()) == []


def test_an_authority_whose_key_is_anothers_signs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "security"
    assert call("security", "init", str(folder)).exit_code == 0
    other = new_authority("another")
    (folder / "ca.key").write_bytes(other.key)
    before = (folder / "coordinator.pem").read_bytes()
    assert "the authority's key is not that of its certificate" in refused("security", "renew", str(folder))
    (folder / "ca.key").write_text("no key")
    assert "has no authority to sign with" in refused("security", "renew", str(folder))
    assert (folder / "coordinator.pem").read_bytes() == before
    shutil.rmtree(folder)
    pair = signed(other, "x", ("::1", "a.example"))
    assert hosts_of(pair.certificate) == ("::1", "a.example")
