"""The launcher of the job, and of torchrun on nodes that join; it starts the job again when it stopped for lack
of state.

The job survives what leaves a whole copy of its state. Where a death took the last copy of a part, the job
stops. What follows is what its users do, or a script of theirs: start it again on the nodes that are whole and
can be reached, from its last checkpoint, under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elasticd_planner.spec.cluster import node_of

from elasticd.records import JobSpec
from elasticd.simulator.cluster.nodes import Node
from elasticd.simulator.cluster.workers import WorkerGroup
from elasticd.simulator.results.progress import Trained
from elasticd.simulator.scenarios.scenario import Scenario


class Launcher:
    """`job` is the name of the newest start. `tell` puts a line on the timeline."""

    def __init__(
        self,
        scenario: Scenario,
        worker_group: WorkerGroup,
        nodes: Sequence[Node],
        trained: Trained,
        tell: Callable[[str, str, dict[str, object]], None],
    ) -> None:
        self._scenario, self._worker_group = scenario, worker_group
        self._nodes, self._trained, self._tell = nodes, trained, tell
        self.job = "job"
        self.restarts = 0
        self.pending = False
        self.needs_nodes = False
        self.harmed = False
        self._started = 0
        self._items: dict[str, float] = {}  # of a sample, by module, in the dataset of the newest start

    def spec(self) -> JobSpec:
        """The spec of the workers' job, as they would tell the coordinator now."""
        model, truth = self._scenario.model, self._worker_group.truth
        return JobSpec(
            job=self.job,
            model=model.spec(),
            global_batch=model.global_batch,
            micro_batch=model.micro_batch,
            samples=1 << 40,
            sample_tokens=float(truth.tokens),
            seed=self._scenario.seed,
            packed=self._scenario.packed(truth.tokens),
            modules=model.module_specs(self._items),
        )

    def whole(self) -> list[Node]:
        """The nodes on which torchrun can be started: all devices live, and somebody reaches them."""
        broken = {node_of(name) for name in self._worker_group.truth.dead} | self._worker_group.cut
        return [node for node in self._nodes if node.name not in broken]

    def start(self) -> None:
        """A torchrun on each node."""
        nodes = self.whole()
        if not nodes:
            self.needs_nodes = True
            return
        modules = self._worker_group.truth.modules
        self._items = {module.name: module.items_a_sample for module in modules}
        spec = self.spec()
        for node in nodes:
            node.torchrun(spec, self._pid(), len(self._nodes))

    def more_nodes(self, node: Node) -> None:
        """A node is there that was not. If the job was waiting for one it is started again. If the job runs
        elsewhere a torchrun is started on the node: its workers stand by, and the next plan may use them."""
        if node not in self.whole():
            return
        if self.needs_nodes:
            self._again_later()
        elif not self.pending and not node.runs:
            node.torchrun(self.spec(), self._pid(), len(self._nodes))

    def _pid(self) -> int:
        self._started += 1
        return 10_000 * self._started

    def stopped(self) -> None:
        """The job is over before its end: it is started again if that can help."""
        if self.harmed:
            self._again_later()
        else:
            self.needs_nodes = True

    def _again_later(self) -> None:
        self.needs_nodes, self.pending = False, True
        self._worker_group.engine.after(self._scenario.restart.seconds, self._again)

    def _again(self) -> None:
        self.pending, self.harmed = False, False
        for node in self._nodes:
            node.end("ended with its job")
        nodes = self.whole()
        if not nodes:
            self.needs_nodes = True
            return
        lost = self._trained.back_to(self._scenario.restart.checkpoint_steps)
        self._worker_group.start(round(self._trained.steps))
        self.restarts += 1
        self.job = f"job-{self.restarts + 1}"
        left = len(self._nodes) - len(nodes)
        text = (
            f"the job is started again on {len(nodes)} nodes{f', without {left}' if left else ''}, from step "
            f"{self._worker_group.step}: {lost:.0f} steps are lost"
        )
        self._tell("restart", text, {"nodes": len(nodes), "step": self._worker_group.step, "lost": round(lost)})
        self.start()
