"""A real etcd of three members on loopback, with its default timing, whose members can be killed and frozen;
and relays before it, by which one client alone is cut off."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from elasticd.store.etcd import EtcdStore
from elasticd.store.protocol import StoreError
from elasticd.store.server import find_programs, free_ports
from elasticd.store.session import EtcdOptions
from elasticd.system.parent_death_signal import ending_with_us

NAMES = ("e0", "e1", "e2")
#: Seconds for a member to answer, at its start and after it.
PATIENCE = 60.0
#: How often ports are chosen before a start fails because others take them.
ATTEMPTS = 3


class PortTaken(Exception):
    """Another process took a member's port after it was chosen; the message is the member's log."""


class Trio:
    """Three members by name; `with` starts and ends them, on ports that a member keeps when it is restarted."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder, self._host = folder, host
        self._client: dict[str, int] = {}
        self._peer: dict[str, int] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd, self._ctl = find_programs("etcd", "etcdctl")

    def __enter__(self) -> Trio:
        try:
            for _ in range(ATTEMPTS - 1):
                with contextlib.suppress(PortTaken):
                    self._form()
                    return self
            self._form()
        except BaseException:
            self.close()
            raise
        return self

    def _form(self) -> None:
        """Three new members on new ports. Raises PortTaken."""
        self.close()
        for name in NAMES:
            shutil.rmtree(self._data(name), ignore_errors=True)
            self._log(name).unlink(missing_ok=True)
        ports = free_ports(2 * len(NAMES), self._host)
        self._client = dict(zip(NAMES, ports, strict=False))
        self._peer = dict(zip(NAMES, ports[len(NAMES) :], strict=True))
        self.start(*NAMES)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"{self._host}:{self._client[name]}" for name in NAMES)

    def endpoint(self, name: str) -> str:
        return f"{self._host}:{self._client[name]}"

    def start(self, *names: str) -> None:
        """Starts members, and waits until each of them answers a linearizable read."""
        for name in names:
            with self._log(name).open("ab") as log:
                self._running[name] = subprocess.Popen(
                    ending_with_us(self._command(name), signal.SIGKILL),
                    stdout=log,
                    stderr=log,
                    env={key: value for key, value in os.environ.items() if not key.startswith("ETCD_")},
                )
        for name in names:
            self._wait(name)

    def kill(self, *names: str) -> None:
        for name in names:
            self._running[name].kill()
        for name in names:
            self._running[name].wait()

    def signal(self, number: signal.Signals, *names: str) -> None:
        for name in names:
            self._running[name].send_signal(number)

    def leader(self) -> str:
        """The member that leads the others."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for name in NAMES:
                done = self._control("endpoint", "status", "--write-out=fields", members=(name,))
                fields = dict(line.split(" : ", 1) for line in done.splitlines() if " : " in line)
                if fields and fields['"MemberID"'] == fields['"Leader"']:
                    return name
            time.sleep(0.1)
        raise AssertionError("no etcd member leads")

    def compact(self) -> None:
        """Drops all history before now."""
        with self.store() as store:
            revision = store.identity().revision
        self._control("compaction", str(revision), "--physical")

    def back_up(self, path: Path) -> None:
        self._control("snapshot", "save", str(path), members=("e0",))

    def restore(self, path: Path) -> None:
        """Takes all members down and starts them again with the data of a backup."""
        self.kill(*NAMES)
        for name in NAMES:
            shutil.rmtree(self._data(name))
            peer = f"http://{self._host}:{self._peer[name]}"
            self._control(
                *("snapshot", "restore", str(path), "--name", name, "--data-dir", str(self._data(name))),
                *("--initial-cluster", self._cluster, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster-token", "trio"),
                members=(),
            )
        self.start(*NAMES)

    @contextlib.contextmanager
    def store(self) -> Iterable[EtcdStore]:  # type: ignore[misc]
        """A client of all members."""
        store = EtcdStore(EtcdOptions(endpoints=self.endpoints))
        try:
            yield store
        finally:
            store.close()

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    @property
    def _cluster(self) -> str:
        return ",".join(f"{name}=http://{self._host}:{self._peer[name]}" for name in NAMES)

    def _data(self, name: str) -> Path:
        return self._folder / f"{name}.data"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _command(self, name: str) -> list[str]:
        client, peer = f"http://{self._host}:{self._client[name]}", f"http://{self._host}:{self._peer[name]}"
        return [
            *(self._etcd, "--name", name, "--data-dir", str(self._data(name))),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", self._cluster, "--initial-cluster-token", "trio"),
            *("--logger", "zap", "--log-level", "warn"),
        ]

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            store = EtcdStore(EtcdOptions(endpoints=(self.endpoint(name),)))
            try:
                store.identity()
                return
            except StoreError:
                log = self._log(name).read_text(errors="replace")[-2000:]
                ended = self._running[name].poll() is not None
                if ended and "address already in use" in log:
                    raise PortTaken(log) from None
                assert not ended, f"etcd {name} ended:\n{log}"
                assert time.monotonic() < deadline, f"etcd {name} does not answer:\n{log}"
                time.sleep(0.05)
            finally:
                store.close()

    def _control(self, *arguments: str, members: Sequence[str] = NAMES) -> str:
        where = ["--endpoints", ",".join(self.endpoint(name) for name in members)] if members else []
        done = subprocess.run(
            [self._ctl, *where, *arguments],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0 or arguments[0] == "endpoint", done.stderr
        return done.stdout


class Relay:
    """A TCP relay that can be cut: what it holds then goes nowhere, and nobody is told. Healed, its old
    connections end and new ones get through."""

    def __init__(self, upstream: str) -> None:
        host, port = upstream.rsplit(":", 1)
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._drop()
        self._open.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop()
        self._open.set()

    def _drop(self) -> None:
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            self._open.wait()
            with socket.create_connection(self._upstream) as server:
                self._sockets.append(server)
                back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
                back.start()
                self._copy(client, server)
                back.join()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
