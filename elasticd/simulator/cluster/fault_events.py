"""The faults that a script brings to the cluster, and their consequences: links that break, processes that end.

What the machines make of it is theirs: a death reaches the coordinator as its agent's word, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticd_planner.spec.cluster import node_of

from elasticd.chaos.faults import Fault
from elasticd.simulator.cluster.launcher import Launcher
from elasticd.simulator.cluster.leader import SimulatedLeader
from elasticd.simulator.cluster.nodes import Node
from elasticd.simulator.cluster.worker import SimulatedWorker
from elasticd.simulator.cluster.workers import WorkerGroup
from elasticd.simulator.engine import FAULT
from elasticd.simulator.scenarios.scenario import Scenario


class FaultScript:
    """Faults by step and by time. `leader` is the one that leads, or the last one where none is alive;
    `take_over` ends it; `tell` puts a line on the timeline."""

    def __init__(
        self,
        scenario: Scenario,
        worker_group: WorkerGroup,
        nodes: dict[str, Node],
        launcher: Launcher,
        leader: Callable[[], SimulatedLeader],
        take_over: Callable[[], None],
        tell: Callable[[str, str, dict[str, object]], None],
    ) -> None:
        self._by_step = sorted((f for f in scenario.faults if f.step is not None), key=lambda f: f.step or 0)
        self._by_time = sorted(
            (f for f in scenario.faults if f.seconds is not None), key=lambda f: f.seconds or 0.0
        )
        self._engine, self._truth, self._worker_group = worker_group.engine, worker_group.truth, worker_group
        self._patience = scenario.times.patience
        self._nodes, self._operator, self._tell = nodes, launcher, tell
        self._leader, self._take_over = leader, take_over
        self._unlinked: set[str] = set()
        self._healing: list[float] = []
        self._joining: list[float] = []

    def before(self) -> None:
        """Leaves out the devices that are dead from the beginning."""
        while self._by_step and not self._by_step[0].step and self._by_step[0].kind == "kill":
            fault = self._by_step.pop(0)
            self._truth.strike(fault)
            self._publish(fault)

    def begin(self) -> None:
        """Puts all faults by time on the clock, and strikes those of step 0. Called once, after `before`."""
        for fault in self._by_time:
            self._engine.call_at(fault.seconds or 0.0, lambda f=fault: self._strike(f), FAULT)  # type: ignore[misc]
        self.at_step(0)

    def at_step(self, step: int) -> None:
        """All that happens once `step` steps are done."""
        while self._by_step and (self._by_step[0].step or 0) <= step:
            self._strike(self._by_step.pop(0))

    @property
    def next_step(self) -> int | None:
        """The step of the next fault by step."""
        return self._by_step[0].step if self._by_step else None

    def times(self, now: float) -> list[float]:
        """When something will happen by itself."""
        listed = [f.seconds for f in self._by_time if f.seconds is not None and f.seconds > now]
        return listed + self._healing + self._joining

    def brings_nodes(self, now: float) -> bool:
        """Returns True if time alone brings nodes (back)."""
        joins = any(f.kind == "join" and (f.seconds or 0.0) > now for f in self._by_time)
        return joins or bool(self._healing or self._joining)

    def linked(self, node: Node) -> bool:
        """Returns True if a node finds a leader, if there is one."""
        gone = self._unlinked | self._worker_group.cut | {node_of(name) for name in self._crashed()}
        return node.name not in gone

    def _crashed(self) -> set[str]:
        return {name for name in self._truth.dead if self._truth.dead.issuperset(self._of(name))}

    def _of(self, device: str) -> list[str]:
        """All devices of a device's node."""
        node = node_of(device)
        return [name for name in self._truth.names if node_of(name) == node]

    def _publish(self, fault: Fault) -> None:
        data: dict[str, object] = {"fault": fault.kind, "where": fault.device or fault.node}
        for key in ("factor", "lasts", "tokens"):
            if (value := getattr(fault, key)) not in (0, 1.0):
                data[key] = value
        self._tell("fault", fault.text, data)

    def _strike(self, fault: Fault) -> None:
        self._publish(fault)
        ending = fault.ending(self._engine.now())
        if ending is not None:
            self._end_later(ending)
        self._truth.strike(fault)
        match fault.kind:
            case "kill":
                self._kill(fault)
            case "join":
                self._join(fault)
            case "partition":
                self._partition(self._nodes[fault.node], fault.lasts)
            case "takeover":
                self._take_over()
            case "freeze":
                for worker in self._workers(fault):
                    worker.freeze()
                    self._silent(worker)
            case "thaw":
                for worker in self._workers(fault):
                    worker.thaw()
                self._worker_group.reached()
            case "cut":
                self._unlinked.add(fault.node)
                self._nodes[fault.node].apart = True
                self._unlink(self._nodes[fault.node])
            case "heal":
                self._heal(self._nodes[fault.node])
            case "restart":
                self._restart(self._nodes[fault.node])

    def _end_later(self, ending: Fault) -> None:
        at = ending.seconds or 0.0
        self._joining.append(at)

        def end() -> None:
            self._joining.remove(at)
            self._strike(ending)

        self._engine.call_at(at, end, FAULT)

    def _workers(self, fault: Fault) -> list[SimulatedWorker]:
        """Of the device; nobody where nothing runs there."""
        node = self._nodes[node_of(fault.device)]
        return [worker for worker in node.workers.values() if worker.device == fault.device]

    def _silent(self, worker: SimulatedWorker) -> None:
        """Its peers' patience with it begins."""
        self._worker_group.lose(worker.device, self._patience, f"gave no word for {self._patience:g} s")

    def _heal(self, node: Node) -> None:
        self._unlinked.discard(node.name)
        if node.name not in self._worker_group.cut:
            node.back()
            self._relink(node)

    def _restart(self, node: Node) -> None:
        """The next agent is cut off from nothing but what the network is."""
        if node.name in self._crashed():
            return
        self._unlink(node)
        self._unlinked.discard(node.name)
        if node.name not in self._worker_group.cut:
            node.back()
        node.restart()
        self._relink(node)

    def _unlink(self, node: Node) -> None:
        node.link(False)
        self._leader().lost(node.name)

    def _relink(self, node: Node) -> None:
        node.link(self._leader().alive and self.linked(node))

    def _kill(self, fault: Fault) -> None:
        """A device takes its process with it, and torchrun ends the others on its node. A machine is just
        gone: its peers wait, until a fence or their patience ends that."""
        node = self._nodes[fault.node or node_of(fault.device)]
        self._operator.harmed = True
        if not fault.node:
            node.end(f"{fault.device} is dead")
            return
        node.crash()
        self._unlink(node)

    def starve(self, device: str) -> None:
        """A worker needs more memory than its device has."""
        self._operator.harmed = True
        self._nodes[node_of(device)].end(f"{device} is out of memory")

    def _join(self, fault: Fault) -> None:
        node = self._nodes[fault.node or node_of(fault.device)]
        self._relink(node)
        self._operator.more_nodes(node)

    def _partition(self, node: Node, lasts: float) -> None:
        """Nobody reaches the node: neither the leader and the store nor its peers."""
        until = self._engine.now() + lasts
        self._healing.append(until)
        node.apart = self._operator.harmed = True
        self._worker_group.cut.add(node.name)
        self._unlink(node)
        for worker in node.workers.values():
            self._silent(worker)

        def heal() -> None:
            self._healing.remove(until)
            self._worker_group.cut.discard(node.name)
            self._tell("healed", f"node {node.name} can be reached again", {"node": node.name})
            if node.name not in self._unlinked:
                self._relink(node)
                node.back()
            self._worker_group.reached()
            self._operator.more_nodes(node)

        self._engine.call_at(until, heal, FAULT)
