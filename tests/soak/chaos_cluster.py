"""A cluster of real processes to be harmed: two coordinators, a launcher for each node, and daemons that are
started again."""

from __future__ import annotations

from pathlib import Path

from elasticd_planner.value import Value

from elasticd.chaos.client import Chaos
from elasticd.client import CannotReach
from elasticd.system.child_processes import Child, Processes
from elasticd.testing.cluster import Cluster
from elasticd.wire.api_types import JobStatus

JOB = "soak"


class Shape(Value, frozen=True, kw_only=True):
    """Nodes and the devices of each; forward, backward: emulated seconds of a token in a whole block; flops:
    what the planner is told of that, else it would guess that one device is fastest, and no fault would cost
    the job anything; memory: bytes of a device."""

    nodes: tuple[str, ...] = ("alpha", "beta")
    devices: int = 2
    forward: float = 2e-4
    backward: float = 4e-4
    flops: float = 2e7
    memory: int = 1 << 30
    zero: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The devices, node by node."""
        return tuple(f"{node}/{index}" for node in self.nodes for index in range(self.devices))


class ChaosCluster(Cluster):
    """A daemon that ends is started again (`tend`). `folder` also holds the job's ledgers."""

    shape: Shape
    ended: list[str]  # the daemons that ended by themselves, with their last words

    def __init__(
        self, shape: Shape, processes: Processes, folder: Path, sockets: Path, *, separate: bool = False
    ) -> None:
        super().__init__(shape.nodes, processes, folder, sockets, self._toml, coordinators=2, separate=separate)
        self.shape, self.ended = shape, []
        self._launchers: dict[str, Child] = {}

    def _toml(self, etcd: str, state: str) -> str:
        shape = self.shape
        return "\n".join(
            [
                '[cluster]\nname = "soak"',
                f'[etcd]\nendpoints = ["{etcd}"]',
                f'[coordinator]\nhost = "{self._host}"\nport = 0\nstate = "{state}"',
                f'[agent]\ndevices = {shape.devices}\nstate = "{state}"',
                f"[emulate]\nenabled = true\nforward = {shape.forward!r}\nbackward = {shape.backward!r}",
                f"memory = {shape.memory}",
                f"[planner]\nflops = {shape.flops!r}",
                "[chaos]\nenabled = true",
                "[security]\ninsecure = true" if self._separate else "",
                "",
            ]
        )

    # -- the job -----------------------------------------------------------------------------------------------

    def start_job(self, script: Path, *options: str) -> None:
        """A torchrun for each device, which starts its worker again whenever that dies."""
        nodes = len(self.shape.nodes)
        for node in self.shape.nodes:
            self._launchers[node] = self.python(
                f"run-{node}",
                *("-m", "elasticd", "run", "--job", JOB, "--nnodes", str(nodes)),
                *("--devices", str(self.shape.devices), "--socket", self.socket(node)),
                *("--max-restarts", "100000", str(script), str(self.folder), *options),
                node=node,
            )

    def start_plain(self, script: Path, *options: str) -> Child:
        """The undisturbed run."""
        return self.python("plain", str(script), str(self.folder), "--plain", *options)

    def job(self) -> JobStatus | None:
        """The job as the leader sees it, None while nobody leads, or nobody has joined."""
        try:
            return self.api().status().job(JOB)
        except CannotReach:
            return None

    def unmet(self) -> set[str]:
        """The nodes that the leader does not reach. Raises `CannotReach`."""
        return set(self.nodes) - {node.node for node in self.api().status().nodes if node.connected}

    def end_codes(self, seconds: float) -> dict[str, int]:
        """The launchers' exit codes: all end by themselves when the job is over."""
        return {child.name: self._processes.wait(child, seconds) for child in self._launchers.values()}

    # -- harm --------------------------------------------------------------------------------------------------

    def chaos(self) -> Chaos:
        """Chaos at the coordinator that leads. Raises `CannotReach`."""
        return Chaos(self.api())

    def kill_leader(self) -> str:
        """Kills the coordinator that leads and starts another, which stands by; its name."""
        name = self.api().status().leader.name
        child = self._coordinators.pop(name)
        child.process.kill()
        child.process.wait()
        self.start_coordinator()
        return name

    def restart_agent(self, node: str) -> None:
        """Kills a node's agent and starts another."""
        self.stop_agent(node)
        self.start_agent(node)

    def stop_agent(self, node: str) -> None:
        """Kills a node's agent; no other is started until `start_agent`."""
        child = self._agents.pop(node)
        child.process.kill()
        child.process.wait()

    def has_agent(self, node: str) -> bool:
        """Returns True if the node's agent runs."""
        return node in self._agents

    def tend(self) -> None:
        """As a service manager would: who cannot go on is started again."""
        for name, child in list(self._coordinators.items()):
            if child.code is not None:
                self.ended.append(f"{child.name} ended with {child.code}: {child.said(3)}")
                del self._coordinators[name]
                self.start_coordinator()
        for node, child in list(self._agents.items()):
            if child.code is not None:
                self.ended.append(f"{child.name} ended with {child.code}: {child.said(3)}")
                self.start_agent(node)
        self._processes.check()

    def ended_launchers(self) -> dict[str, int]:
        """The exit codes of those that are gone."""
        return {name: child.code for name, child in self._launchers.items() if child.code is not None}
