"""`elasticd run` as a user gives it, over a cluster's real coordinator and agents, for tests."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil
from click.testing import CliRunner

from elasticd.cli.app import elasticd
from elasticd.store.server import EtcdServer
from elasticd.testing.waiting import until
from tests import nursery
from tests.etcds import SharedEtcd
from tests.integration.cluster import Cluster
from tests.liveness import living
from tests.torchruns import Torchrun


class Launched(Torchrun):
    """One `elasticd run` on a node."""

    def __init__(self, cluster: Cluster, node: str, *options: str, **changed: str) -> None:
        counted = "--devices" in options or "--device-ids" in options
        devices = () if counted else ("--devices", str(cluster.nodes[node]))
        command = ("run", "--socket", cluster.socket(node), *devices, *options)
        super().__init__(cluster.folder, *command, program="elasticd", **changed)

    def wait(self, seconds: float = 300.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"elasticd run did not end:\n{self.said}") from None

    @property
    def ours(self) -> list[str]:
        """The lines of elasticd's own."""
        return [line for line in self.said.splitlines() if line.startswith("elasticd: ")]


class Launches:
    """A cluster whose jobs are started by `elasticd run`, and ended with it."""

    def __init__(self, nodes: dict[str, int], etcd: SharedEtcd | EtcdServer | None = None) -> None:
        self.cluster = Cluster(nodes, etcd=etcd.endpoint if etcd is not None else "")
        self._runs: list[Launched] = []

    def __enter__(self) -> Launches:
        self.cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.end()
        self.cluster.close()

    def end(self) -> None:
        """Ends what is left of the runs so far: after a test that failed they would hold their devices."""
        while self._runs:
            self._runs.pop().stop()

    def script(self, text: str, name: str = "train.py") -> Path:
        """Writes a user's script."""
        path = self.cluster.folder / name
        path.write_text(text)
        return path

    def run(self, node: str, *options: str | Path, **changed: str) -> Launched:
        """Gives the command on a node."""
        self._runs.append(Launched(self.cluster, node, *map(str, options), **changed))
        return self._runs[-1]

    def ask(self, *command: str) -> str:
        """What a command of `elasticd` prints about this cluster."""
        result = CliRunner().invoke(elasticd, [*command, "--coordinator", self.cluster.coordinator.url])
        assert result.exit_code == 0, result.output
        return result.output

    def status(self) -> dict[str, Any]:
        """The whole status, as JSON has it."""

        async def look() -> dict[str, Any]:
            found: dict[str, Any] = msgspec.to_builtins(await self.cluster.coordinator.status())
            return found

        return self.cluster.call(look())

    def job(self, name: str) -> dict[str, Any]:
        """A job in live mode, as the status has it; empty where it has none of that name."""
        return next((job for job in self.status()["jobs"] if job["job"] == name), {})

    def restarting(self, name: str) -> dict[str, Any]:
        """A job in restart mode, likewise."""
        return next((job for job in self.status()["restarts"] if job["job"] == name), {})


def torchrun_workers(command: psutil.Process) -> list[psutil.Process]:
    """The processes of the script: children of the torchruns that the command started."""
    torchruns = living(command.children(), unnamed=nursery.NAME)
    return [worker for torchrun in torchruns for worker in living(torchrun.children(), unnamed=nursery.NAME)]


def steps(said: str) -> dict[int, set[str]]:
    """What each step's loss was said to be, by the examples that make no Job."""
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+) world \d+ loss ([\d.]+)", said):
        found.setdefault(int(step), set()).add(loss)
    return found


def reaches(run: Launched, step: int) -> None:
    """Waits until a job without a Job has made a step."""
    until(lambda: step in steps(run.said) or run.process.poll() is not None, lambda: run.said)
    assert step in steps(run.said), run.said
