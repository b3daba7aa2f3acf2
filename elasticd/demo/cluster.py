"""The demo's cluster as real processes: etcd, a coordinator, agents, torchruns, and the reference run."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from elasticd.client import Api, CannotReach, leader_url
from elasticd.config.tree import Config, load
from elasticd.demo.scenario import JOB, DemoError, Scenario, training_script
from elasticd.store.server import EtcdServer, EtcdServerError
from elasticd.system.child_processes import Child, Processes

START_SECONDS = 60.0
LEDGER, PLAIN_LEDGER = "ledger.jsonl", "plain.jsonl"
#: One thread each: there are more processes than cores.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Cluster:
    """Started by `with`, one part after the other; ended by it in reverse. `folder` holds configuration, logs
    and ledgers; `sockets` the agents' sockets, whose paths must be short, and what ends with the run."""

    def __init__(self, scenario: Scenario, processes: Processes, folder: Path, sockets: Path) -> None:
        self._scenario, self._processes = scenario, processes
        self._folder, self._sockets = folder, sockets
        self._exits = ExitStack()
        self._script = str(training_script())
        self.configuration = folder / "demo.toml"
        self.ledger, self.plain_ledger = folder / LEDGER, folder / PLAIN_LEDGER
        self.daemons: list[Child] = []
        self.torchruns: list[Child] = []
        self.api: Api

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def _start(self) -> None:
        try:
            etcd = self._exits.enter_context(EtcdServer(fsync=False))
        except EtcdServerError as error:
            raise DemoError(str(error)) from error
        # The last in is the first out: the processes end before the etcd that they need.
        self._exits.callback(self._processes.end)
        self.configuration.write_text(self._scenario.configuration(etcd.endpoint, str(self._sockets / "state")))
        self.daemons.append(self._python("coordinator", "-m", "elasticd", "coordinator", *self.named))
        for node in self._scenario.nodes:
            options = ("--node", node, "--socket", self.socket(node))
            self.daemons.append(self._python(f"agent-{node}", "-m", "elasticd_agent", *self.named, *options))
        config = load(self.configuration)
        url = self._processes.until(
            lambda: _url(config), "the coordinator's election", START_SECONDS, needs=self.daemons
        )
        self.api = self._exits.enter_context(Api(url))
        nodes = set(self._scenario.nodes)
        self._processes.until(
            lambda: {node.node for node in self.api.status().nodes} >= nodes,
            "the agents' arrival",
            START_SECONDS,
            needs=self.daemons,
        )

    @property
    def named(self) -> tuple[str, str]:
        """The option that names our configuration."""
        return ("--config", str(self.configuration))

    def socket(self, node: str) -> str:
        return str(self._sockets / f"{node}.sock")

    def start_job(self) -> None:
        """One torchrun for each node."""
        scenario = self._scenario
        for node in scenario.nodes:
            self.torchruns.append(
                self._python(
                    f"torchrun-{node}",
                    *("-m", "torch.distributed.run"),
                    *(f"--nnodes={len(scenario.nodes)}", f"--nproc-per-node={scenario.devices}"),
                    *("--rdzv-backend=elasticd", f"--rdzv-endpoint={self.socket(node)}", f"--rdzv-id={JOB}"),
                    *(self._script, *scenario.training, "--ledger", str(self.ledger)),
                )
            )

    def start_plain(self) -> Child:
        """The reference: plain torch in one process, with what the job leaves of the cores."""
        options = (*self._scenario.training, "--plain", "--ledger", str(self.plain_ledger))
        return self._python("plain", self._script, *options, idle=True)

    def chaos(self, *arguments: str) -> None:
        """`elasticd chaos ...`, as a user would call it."""
        child = self._python(f"chaos-{arguments[0]}", "-m", "elasticd", "chaos", *arguments, *self.named)
        if self._processes.wait(child, START_SECONDS) != 0:
            raise DemoError(f"elasticd chaos {' '.join(arguments)} failed:\n{child.said()}")

    def check(self) -> None:
        """Raises ProcessError when a daemon is gone."""
        for child in self.daemons:
            self._processes.alive(child)

    def wait_for_torchruns(self, seconds: float = 60.0) -> dict[str, int]:
        """Their exit codes by name: all end by themselves when the job is over."""
        return {child.name: self._processes.wait(child, seconds) for child in self.torchruns}

    def _python(self, name: str, *arguments: str, idle: bool = False) -> Child:
        return self._processes.start(name, [sys.executable, *arguments], environment=_ENVIRONMENT, idle=idle)


def _url(config: Config) -> str | None:
    """Where the coordinator is, once it leads."""
    try:
        return leader_url(config)
    except CannotReach:
        return None
