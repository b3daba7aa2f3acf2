"""A cluster of real processes to be harmed: etcd, two coordinators, an agent and a launcher on each "node"."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from elasticd_planner.value import Value

from elasticd.chaos.client import Chaos
from elasticd.client import Api, CannotReach, JobStatus
from elasticd.records import Keys
from elasticd.store.etcd import EtcdStore
from elasticd.store.leader import Leader
from elasticd.store.protocol import WatchEvent, WatchItem
from elasticd.store.server import EtcdServer
from elasticd.store.session import EtcdOptions
from elasticd.system.child_processes import Child, ProcessError, Processes
from elasticd.testing.network_namespaces import HOST, Namespaces, namespaces

JOB = "soak"
T = TypeVar("T")
#: Seconds that anything may take that must happen: a start, an election, the return of a node.
PATIENCE = 120.0
_LOOK = 0.1
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


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
        return tuple(f"{node}/{index}" for node in self.nodes for index in range(self.devices))


class Cluster:
    """Started by `with`, ended by it. `folder` holds logs, configuration and ledgers; `sockets`, whose path
    must be short, sockets and the daemons' memory. separate: each node is in a network namespace of its own, so
    that the data network between two can be cut in silence (root alone). `seen` is all that etcd was told of
    the cluster, `ended` which daemons ended by themselves, and their last words."""

    def __init__(
        self, shape: Shape, processes: Processes, folder: Path, sockets: Path, *, separate: bool = False
    ) -> None:
        self.shape, self.folder = shape, folder
        self._separate, self._host = separate, HOST if separate else "127.0.0.1"
        self.spaces: Namespaces | None = None
        self._processes, self._sockets = processes, sockets
        self._exits = ExitStack()
        self._started = 0
        self._coordinators: dict[str, Child] = {}
        self._agents: dict[str, Child] = {}
        self._launchers: dict[str, Child] = {}
        self.configuration = folder / "soak.toml"
        self.keys = Keys(cluster="soak")
        self.seen: list[WatchEvent] = []
        self.ended: list[str] = []
        self._api: Api | None = None

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
        if self._separate:
            self.spaces = self._exits.enter_context(namespaces(self.shape.nodes, data=True))
        etcd = self._exits.enter_context(EtcdServer(fsync=False, host=self._host))
        self._exits.callback(self._processes.end)
        self._store = EtcdStore(EtcdOptions(endpoints=(etcd.endpoint,)))
        self._exits.callback(self._store.close)
        self._store.watch(self.keys.root, 1, self._see)
        self.configuration.write_text(self._configured(etcd.endpoint))
        for _ in range(2):
            self._start_coordinator()
        for node in self.shape.nodes:
            self._start_agent(node)
        nodes = set(self.shape.nodes)
        self.until(
            lambda: {n.node for n in self.api().status().nodes if n.connected} >= nodes, "the agents' arrival"
        )

    def _see(self, item: WatchItem) -> None:
        assert isinstance(item, WatchEvent), "nothing is compacted in so short a time"
        self.seen.append(item)

    def _configured(self, etcd: str) -> str:
        shape = self.shape
        return "\n".join(
            [
                '[cluster]\nname = "soak"',
                f'[etcd]\nendpoints = ["{etcd}"]',
                f'[coordinator]\nhost = "{self._host}"\nport = 0\nstate = "{self._sockets}"',
                f'[agent]\ndevices = {shape.devices}\nstate = "{self._sockets}"',
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
            self._launchers[node] = self._python(
                f"run-{node}",
                *("-m", "elasticd", "run", "--job", JOB, "--nnodes", str(nodes)),
                *("--devices", str(self.shape.devices), "--socket", self._socket(node)),
                *("--max-restarts", "100000", str(script), str(self.folder), *options),
                within=self._within(node),
            )

    def start_plain(self, script: Path, *options: str) -> Child:
        """The undisturbed run."""
        return self._python("plain", str(script), str(self.folder), "--plain", *options)

    def job(self) -> JobStatus | None:
        """The job as the leader sees it, None while nobody leads, or nobody has joined."""
        try:
            return self.api().status().job(JOB)
        except CannotReach:
            return None

    def end_codes(self, seconds: float) -> dict[str, int]:
        """The launchers' exit codes: all end by themselves when the job is over."""
        return {child.name: self._processes.wait(child, seconds) for child in self._launchers.values()}

    def wait(self, child: Child, seconds: float) -> int:
        return self._processes.wait(child, seconds)

    # -- harm --------------------------------------------------------------------------------------------------

    def api(self) -> Api:
        """The present leader's. Raises `CannotReach`."""
        key = next((event for event in reversed(self.seen) if event.key == self.keys.leader), None)
        if key is None or key.kind == "delete":
            raise CannotReach("nobody leads")
        url = Leader.of(key.item).value
        if self._api is None or self._api.url != url:
            if self._api is not None:
                self._api.close()
            self._api = Api(url)
        return self._api

    def chaos(self) -> Chaos:
        return Chaos(self.api())

    def kill_leader(self) -> str:
        """Kills the coordinator that leads and starts another, which stands by; its name."""
        name = self.api().status().leader.name
        child = self._coordinators.pop(name)
        child.process.kill()
        child.process.wait()
        self._start_coordinator()
        return name

    def restart_agent(self, node: str) -> None:
        """Kills a node's agent and starts another."""
        child = self._agents[node]
        child.process.kill()
        child.process.wait()
        self._start_agent(node)

    def stop_agent(self, node: str) -> None:
        """Kills a node's agent; no other is started until `start_agent`."""
        child = self._agents.pop(node)
        child.process.kill()
        child.process.wait()

    def start_agent(self, node: str) -> None:
        """Starts another agent on a node that has none."""
        self._start_agent(node)

    def has_agent(self, node: str) -> bool:
        """Whether the node's agent runs."""
        return node in self._agents

    def tend(self) -> None:
        """As a service manager would: who cannot go on is started again."""
        for name, child in list(self._coordinators.items()):
            if child.code is not None:
                self.ended.append(f"{child.name} ended with {child.code}: {child.said(3)}")
                del self._coordinators[name]
                self._start_coordinator()
        for node, child in list(self._agents.items()):
            if child.code is not None:
                self.ended.append(f"{child.name} ended with {child.code}: {child.said(3)}")
                self._start_agent(node)
        self._processes.check()

    def ended_launchers(self) -> dict[str, int]:
        """The exit codes of those that are gone."""
        return {name: child.code for name, child in self._launchers.items() if child.code is not None}

    def until(self, condition: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
        """The first value of `condition` that is true; a coordinator that is not there is waited for. Raises
        ProcessError after `seconds`."""
        deadline = time.monotonic() + seconds
        said = ""
        while time.monotonic() < deadline:
            self.tend()
            try:
                if value := condition():
                    return value
            except CannotReach as error:
                said = f": {error}"
            self._processes.pause(_LOOK)
        raise ProcessError(f"{what} did not happen within {seconds:g} s{said}")

    # -- processes ---------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self._started += 1
        name = f"c{self._started}"
        self._coordinators[name] = self._python(
            f"coordinator-{name}", "-m", "elasticd", "coordinator", *self._named, "--name", name
        )

    def _start_agent(self, node: str) -> None:
        self._started += 1
        address = self.spaces.data_address(node) if self.spaces is not None else self._host
        options = ("--node", node, "--socket", self._socket(node), "--address", address)
        self._agents[node] = self._python(
            f"agent-{node}-{self._started}",
            *("-m", "elasticd_agent", *self._named, *options),
            within=self._within(node),
        )

    @property
    def _named(self) -> tuple[str, str]:
        return ("--config", str(self.configuration))

    def _socket(self, node: str) -> str:
        return str(self._sockets / f"{node}.sock")

    def _within(self, node: str) -> tuple[str, ...]:
        """What a node's commands begin with."""
        return self.spaces.within(node) if self.spaces is not None else ()

    def _python(self, name: str, *arguments: str, within: tuple[str, ...] = ()) -> Child:
        command = [*within, sys.executable, *arguments]
        return self._processes.start(name, command, environment=_ENVIRONMENT)
