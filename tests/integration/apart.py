"""Nodes with a network of their own each, for tests: real daemons and `elasticd run` in network namespaces."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elasticd.store.server import find_etcd
from elasticd.system.parent_death_signal import ending_with_us
from elasticd.testing.network_namespaces import Namespaces
from tests import forkserver
from tests.integration import train_ledger, within
from tests.torchruns import environment


class Apart:
    """Two nodes: network namespaces, or (without `net`) two loopback addresses of this machine. What is started
    on them ends with `stack`; `file` is their configuration."""

    def __init__(self, folder: Path, net: Namespaces | None, stack: contextlib.ExitStack) -> None:
        self.folder, self.net, self._stack = folder, net, stack
        self.file = folder / "elasticd.toml"

    def address(self, node: str) -> str:
        return self.net.address(node) if self.net is not None else {"a": "127.0.0.2", "b": "127.0.0.3"}[node]

    def socket(self, node: str) -> str:
        return str(self.folder / f"{node}.sock")

    def start(self, node: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A program on a node, whose output is in the file of its name."""
        begin: Sequence[str] = self.net.within(node) if self.net is not None else ()
        with (self.folder / name).open("wb") as log:
            process = subprocess.Popen(
                ending_with_us([*begin, *command]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return process

    def etcd(self) -> str:
        """Starts one on the first node, where all namespaces reach it; its endpoint."""
        endpoint, folder = f"{self.address('a')}:2379", str(self.folder / "data")
        client, peer = f"http://{endpoint}", f"http://{self.address('a')}:2380"
        urls = ("--listen-client-urls", client, "--advertise-client-urls", client)
        urls += ("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer)
        cluster = ("--name", "one", "--initial-cluster", f"one={peer}", "--log-level", "warn")
        self.start("a", "etcd", find_etcd(), *urls, *cluster, "--data-dir", folder, "--unsafe-no-fsync")
        return endpoint

    def elasticd(self, node: str, name: str, module: str, *options: str) -> subprocess.Popen[bytes]:
        return self.start(node, name, sys.executable, "-m", module, *options, "--config", str(self.file))

    def run(self, node: str, steps: int) -> forkserver.Forked:
        """`elasticd run` on a node."""
        namespace = self.net.name(node) if self.net is not None else ""
        options = ("--job", "job", "--nnodes", "2", "--devices", "1", "--socket", self.socket(node))
        # A replica of the state on each node: so small a model could do with one device.
        job = json.dumps({"parallelism": {"zero": 1, "replicas": 2}})
        script = (train_ledger.__file__, str(self.folder), str(steps), job)
        arguments, log = (namespace, "run", *options, *script), self.folder / f"run-{node}"
        process = forkserver.start(Path(within.__file__), *arguments, environment=environment(), output=log)
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.kill)
        return process

    def said(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")
