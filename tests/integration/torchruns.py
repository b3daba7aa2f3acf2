"""Real torchruns in restart mode over a cluster's real agents and a real etcd, with unmodified scripts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from elasticd.config.tree import with_overrides
from elasticd.store.server import EtcdServer
from elasticd.testing.waiting import until
from tests.etcds import SharedEtcd
from tests.integration.cluster import ROOT, Cluster
from tests.torchruns import Torchrun

EXAMPLES = ROOT / "examples"


class InRounds(Torchrun):
    """A torchrun in restart mode. `all_said`: what all torchruns of its job say."""

    def __init__(
        self,
        cluster: Cluster,
        node: str,
        script: Path,
        options: list[str],
        all_said: Callable[[], str],
        *,
        nodes: str,
        conf: str,
    ) -> None:
        self.node, self._all_said = node, all_said
        options = [
            *("--rdzv-backend=elasticd", "--rdzv-id=job"),
            *(f"--rdzv-endpoint={cluster.socket(node)}", f"--rdzv-conf=mode=restart{conf}"),
            *(f"--nnodes={nodes}", f"--nproc-per-node={cluster.nodes[node]}", "--max-restarts=3"),
            *(str(script), *options),
        ]
        super().__init__(cluster.folder, *options, LOGLEVEL="INFO")

    def worlds(self) -> list[int]:
        """The sizes of the worlds that its steps were made in, in order."""
        sizes = [int(size) for size in re.findall(r"world (\d+) loss", self.said)]
        return [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]

    def wait(self, seconds: float = 300.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the torchrun of {self.node} did not end:\n{self._all_said()}") from None


class RestartJob:
    """A cluster of real agents and a coordinator on an etcd that runs, and torchruns that are ended with it."""

    def __init__(
        self,
        etcd: SharedEtcd | EtcdServer,
        nodes: dict[str, int],
        script: Path,
        *options: str,
        nnodes: str,
        conf: str = "",
    ) -> None:
        self._etcd = etcd
        self._nodes = nodes
        self._script, self._options, self._nnodes, self._conf = script, options, nnodes, conf
        self.torchruns: list[InRounds] = []

    def __enter__(self) -> RestartJob:
        self.cluster = Cluster(self._nodes, etcd=self._etcd.endpoint)
        if isinstance(self._etcd, SharedEtcd):
            self.cluster.config = with_overrides(self.cluster.config, {"cluster.name": self._etcd.cluster()})
        self.cluster.__enter__()
        self.folder = self.cluster.folder / "run"
        self.folder.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for torchrun in self.torchruns:
            torchrun.stop()
        self.cluster.close()

    def start(self, node: str, *more: str) -> InRounds:
        options = [*self._options, *more, f"--folder={self.folder}"]
        run = InRounds(
            self.cluster, node, self._script, options, self.said, nodes=self._nnodes, conf=self._conf
        )
        self.torchruns.append(run)
        return run

    def status(self) -> dict[str, Any]:
        """What the coordinator shows of it."""

        async def look() -> list[dict[str, Any]]:
            found = await self.cluster.coordinator.status()
            shown: list[dict[str, Any]] = msgspec.to_builtins(found.restarts)
            return shown

        return next(iter(self.cluster.call(look())), {})

    def lose_agent(self, node: str) -> None:
        """Ends a node's agent for good."""

        async def end() -> None:
            self.cluster._agents[node].stop()
            await self.cluster._serving[node]

        self.cluster.call(end())

    def said(self) -> str:
        return "\n".join(f"-- {run.node}:\n{run.said[-4000:]}" for run in self.torchruns)

    def runs(self, world: int, steps: int = 3, seconds: float = 120.0) -> None:
        """Waits until so many steps more were made in a world of this size."""

        def count() -> int:
            return sum(run.said.count(f"world {world} loss") for run in self.torchruns)

        before = count()
        until(lambda: count() >= before + steps, self.said, seconds=seconds)

    def losses(self) -> dict[int, set[str]]:
        """What each step's loss was said to be; a step that was made again says it again."""
        found: dict[int, set[str]] = {}
        for step, loss in re.findall(r"step (\d+) world \d+ loss ([\d.]+)", self.said_all()):
            found.setdefault(int(step), set()).add(loss)
        return found

    def said_all(self) -> str:
        return "\n".join(run.said for run in self.torchruns)
