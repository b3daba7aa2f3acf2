"""A cluster of real processes on this machine: etcd, coordinators, and an agent for each of its "nodes"."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

from elasticd.client import ApiClient, CannotReach
from elasticd.config.tree import load
from elasticd.records import Keys
from elasticd.store.etcd import EtcdStore
from elasticd.store.leader import ElectedLeader
from elasticd.store.protocol import WatchEvent, WatchItem
from elasticd.store.server import EtcdServer
from elasticd.store.session import EtcdOptions
from elasticd.system.child_processes import Child, ProcessError, Processes
from elasticd.system.torch_build import DEVICE_VARIABLE
from elasticd.testing.network_namespaces import Namespaces, namespaces

#: Seconds that anything may take that must happen: a start, an election, the return of a node.
TIMEOUT_SECONDS = 120.0
_LOOK = 0.1
#: One thread each: there are more processes than cores.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", DEVICE_VARIABLE: "cpu"}
T = TypeVar("T")


class Cluster:
    """Started by `with`, one part after the other, and ended by it in reverse.

    Args:
        nodes: names of the nodes.
        processes: starts and ends the cluster's processes.
        folder: for configuration and logs.
        sockets: for the agents' sockets, whose paths must be short, and what ends with the run.
        configured: the TOML that all processes read, from etcd's endpoint and a folder for the daemons' state.
        coordinators: how many are started; one of them leads.
        separate: whether each node is in a network namespace of its own, so that the data network between two
            nodes can be cut in silence (root alone).
        computes_on: the device of a node's workers, as "cuda:1"; of others it is the CPU.
    """

    configuration: Path  # the file of `configured`
    seen: list[WatchEvent]  # every change of the cluster's keys in etcd
    spaces: Namespaces | None  # the nodes' network namespaces, if they are separate
    keys: Keys

    def __init__(
        self,
        nodes: Sequence[str],
        processes: Processes,
        folder: Path,
        sockets: Path,
        configured: Callable[[str, str], str],
        *,
        coordinators: int = 1,
        separate: bool = False,
        computes_on: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes, self.folder, self.configuration = tuple(nodes), folder, folder / "cluster.toml"
        self.seen, self.spaces = [], None
        self._processes, self._sockets, self._configured = processes, sockets, configured
        self._count, self._separate = coordinators, separate
        self._computes_on = computes_on or {}
        self._host = "127.0.0.1"
        self._exits = ExitStack()
        self._starts: Counter[str] = Counter()
        self._coordinators: dict[str, Child] = {}
        self._agents: dict[str, Child] = {}
        self._api: ApiClient | None = None

    def __enter__(self) -> Self:
        with self._exits as exits:  # what was started is ended where a later part does not start
            self._start()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _start(self) -> None:
        if self._separate:
            self.spaces = self._exits.enter_context(namespaces(self.nodes, data=True))
            self._host = self.spaces.host
        etcd = self._exits.enter_context(EtcdServer(fsync=False, host=self._host))
        # The last in is the first out: the processes end before the etcd that they need.
        self._exits.callback(self._processes.end)
        self.configuration.write_text(self._configured(etcd.endpoint, str(self._sockets / "state")))
        self.keys = Keys(cluster=load(self.configuration).cluster.name)
        store = EtcdStore(EtcdOptions(endpoints=(etcd.endpoint,)))
        self._exits.callback(store.close)
        store.watch(self.keys.root, 1, self._see)
        for _ in range(self._count):
            self.start_coordinator()
        for node in self.nodes:
            self.start_agent(node)
        nodes = set(self.nodes)
        self.until(
            lambda: {n.node for n in self.api().status().nodes if n.connected} >= nodes, "the agents' arrival"
        )

    def _see(self, item: WatchItem) -> None:
        assert isinstance(item, WatchEvent), "nothing is compacted in so short a time"
        self.seen.append(item)

    def api(self) -> ApiClient:
        """The present leader's. Raises `CannotReach`."""
        key = next((event for event in reversed(self.seen) if event.key == self.keys.leader), None)
        if key is None or key.kind == "delete":
            raise CannotReach("nobody leads")
        url = ElectedLeader.of(key.item).value
        if self._api is None or self._api.url != url:
            if self._api is not None:
                self._api.close()
            self._api = ApiClient(url)
        return self._api

    def tend(self) -> None:
        """Raises ProcessError where a daemon has ended, Interrupted where the user asked to end."""
        for child in (*self._coordinators.values(), *self._agents.values()):
            self._processes.alive(child)
        self._processes.check()

    def until(self, condition: Callable[[], T | None], what: str, seconds: float = TIMEOUT_SECONDS) -> T:
        """The first value of `condition` that is true; a coordinator that is not there is waited for. Raises
        ProcessError after `seconds`."""
        deadline = time.monotonic() + seconds
        why = ""
        while time.monotonic() < deadline:
            self.tend()
            try:
                if value := condition():
                    return value
            except CannotReach as error:
                why = f": {error}"
            self._processes.pause(_LOOK)
        raise ProcessError(f"{what} did not happen within {seconds:g} s{why}")

    def wait(self, child: Child, seconds: float) -> int:
        """The exit code of a process. Raises ProcessError after `seconds`."""
        return self._processes.wait(child, seconds)

    # -- processes ---------------------------------------------------------------------------------------------

    @property
    def named(self) -> tuple[str, str]:
        """The option that names the configuration."""
        return ("--config", str(self.configuration))

    def socket(self, node: str) -> str:
        """The path of an agent's socket."""
        return str(self._sockets / f"{node}.sock")

    def start_coordinator(self) -> None:
        """Starts another coordinator."""
        self._starts["coordinators"] += 1
        name = f"c{self._starts['coordinators']}"
        self._coordinators[name] = self.python(
            f"coordinator-{name}", "-m", "elasticd", "coordinator", *self.named, "--name", name
        )

    def start_agent(self, node: str) -> None:
        """Starts an agent on a node that has none."""
        self._starts[node] += 1
        before = self._starts[node] - 1
        address = self.spaces.data_address(node) if self.spaces is not None else self._host
        self._agents[node] = self.python(
            f"agent-{node}-{before}" if before else f"agent-{node}",
            *("-m", "elasticd_agent", *self.named),
            *("--node", node, "--socket", self.socket(node), "--address", address),
            node=node,
        )

    def start_torchrun(self, node: str, job: str, devices: int, *script: str) -> Child:
        """Starts torchrun on a node, with a worker for each of its devices, for a script and its arguments."""
        return self.python(
            f"torchrun-{node}",
            *("-m", "torch.distributed.run", f"--nnodes={len(self.nodes)}", f"--nproc-per-node={devices}"),
            *("--rdzv-backend=elasticd", f"--rdzv-endpoint={self.socket(node)}", f"--rdzv-id={job}"),
            *script,
            node=node,
        )

    def python(self, name: str, *arguments: str, node: str = "", idle: bool = False) -> Child:
        """Starts this Python with these arguments, on a node if one is named. Its output goes to `name`.log.
        idle: it runs when nobody else wants the cores."""
        within = self.spaces.within(node) if self.spaces is not None and node else ()
        command = [*within, sys.executable, *arguments]
        environment = dict(_ENVIRONMENT)
        if node in self._computes_on:
            environment[DEVICE_VARIABLE] = self._computes_on[node]
        return self._processes.start(name, command, environment=environment, idle=idle)
