"""The demo's cluster as real processes: etcd, a coordinator, agents, torchruns, and the reference run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticd.demo.scenario import JOB, DemoError, DemoScenario, training_script
from elasticd.system.child_processes import Child, Processes
from elasticd.system.torch_build import CannotTell, driver_is_there, torch_build
from elasticd.testing.cluster import Cluster

CHAOS_SECONDS = END_SECONDS = 60.0
LEDGER, PLAIN_LEDGER = "ledger.jsonl", "plain.jsonl"


def gpus_of(nodes: Sequence[str]) -> dict[str, str]:
    """The GPU that the workers of each node share, where this machine has any and torch is built for them.

    Raises:
        DemoError: torch would leave them out, or cannot be asked.
    """
    if not driver_is_there():
        return {}
    try:
        build = torch_build()
    except CannotTell as error:
        raise DemoError(f"torch cannot be asked what it computes on: {error}") from error
    if build.refusal:
        raise DemoError(build.refusal)
    if build.computes_on == "cpu":
        return {}
    count = len(build.devices)
    return {node: f"{build.computes_on}:{index % count}" for index, node in enumerate(nodes)}


class DemoCluster(Cluster):
    """The cluster of a scenario. `folder` also holds the ledgers."""

    def __init__(
        self,
        scenario: DemoScenario,
        processes: Processes,
        folder: Path,
        sockets: Path,
        computes_on: Mapping[str, str],
    ) -> None:
        super().__init__(
            scenario.nodes, processes, folder, sockets, scenario.configuration, computes_on=computes_on
        )
        self.scenario, self._script = scenario, str(training_script())
        self.ledger, self.plain_ledger = folder / LEDGER, folder / PLAIN_LEDGER
        self.torchruns: list[Child] = []

    def start_job(self) -> None:
        """One torchrun for each node."""
        script = (self._script, *self.scenario.training, "--ledger", str(self.ledger))
        self.torchruns = [self.start_torchrun(node, JOB, self.scenario.devices, *script) for node in self.nodes]

    def start_plain(self) -> Child:
        """The reference: plain torch in one process, with what the job leaves of the cores."""
        options = (*self.scenario.training, "--plain", "--ledger", str(self.plain_ledger))
        return self.python("plain", self._script, *options, idle=True)

    def hurry(self, child: Child) -> None:
        """Lets the reference compete for the cores."""
        self._processes.hurry(child)

    def chaos(self, *arguments: str) -> None:
        """`elasticd chaos ...`, as a user would call it."""
        child = self.python(f"chaos-{arguments[0]}", "-m", "elasticd", "chaos", *arguments, *self.named)
        if self.wait(child, CHAOS_SECONDS) != 0:
            raise DemoError(f"elasticd chaos {' '.join(arguments)} failed:\n{child.said()}")

    def wait_for_torchruns(self) -> dict[str, int]:
        """Their exit codes by name: all end by themselves when the job is over."""
        return {child.name: self.wait(child, END_SECONDS) for child in self.torchruns}
