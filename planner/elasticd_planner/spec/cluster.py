"""The cluster that a plan is made for: nodes, devices, links, and how slow each device is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property

from elasticd_planner.value import Value, refuse

NORMAL = 1.0

#: A smaller rate is most likely an error of units.
LEAST_RATE = 0.1

#: How many times slower than normal each device is (1.0 normal, inf dead); a device not named is normal.
Rates = Mapping[str, float]


def node_of(device: str) -> str:
    """The node of a device, from its name: "n0" of "n0/3"."""
    return device.rpartition("/")[0]


class Device(Value, frozen=True, kw_only=True):
    """One accelerator (or emulated one): its name "node/index" and its memory in bytes."""

    name: str
    memory: int

    def __post_init__(self) -> None:
        node, slash, index = self.name.rpartition("/")
        if not (slash and node and index.isdigit()):
            refuse(f"device name {self.name!r} is not of the form 'node/index', as in 'n0/3'")
        if self.memory <= 0:
            refuse(f"device {self.name}: memory must be a positive number of bytes, not {self.memory}")

    @property
    def node(self) -> str:
        """The name of its node."""
        return node_of(self.name)


class Link(Value, frozen=True, kw_only=True):
    """What one hop costs: bandwidth in bytes per second, latency in seconds."""

    bandwidth: float = 1e9
    latency: float = 2e-4

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or self.latency < 0:
            refuse(f"link: bandwidth must be positive and latency not negative, not {self}")

    def seconds(self, size: float) -> float:
        """Time to move `size` bytes once over this link."""
        return self.latency + size / self.bandwidth


class Node(Value, frozen=True, kw_only=True):
    """One machine and its devices. Its inner link may differ from the cluster's; `island`: so many devices, by
    consecutive indices, have a quicker link of their own (0: none has)."""

    name: str
    devices: tuple[Device, ...]
    island: int = 0
    inside: Link | None = None
    within: Link | None = None

    def __post_init__(self) -> None:
        for device in self.devices:
            if device.node != self.name:
                refuse(f"device {device.name} is listed under node {self.name!r}")
        if self.island < 0:
            refuse(f"node {self.name}: island {self.island} is how many devices have a link of their own")

    def island_of(self, device: str) -> int:
        """Which island a device of this node is in, by its index."""
        return int(device.rpartition("/")[2]) // self.island if self.island else 0


class Cluster(Value, frozen=True, kw_only=True, dict=True):
    """The nodes of one job, and the links by level: `within` an island of a node (None: as inside), `inside` a
    node, `between` nodes. A node may have links of its own."""

    nodes: tuple[Node, ...]
    inside: Link = Link()
    between: Link = Link()
    within: Link | None = None

    def __post_init__(self) -> None:
        names = [device.name for node in self.nodes for device in node.devices]
        if len({*names}) < len(names):
            counts = Counter(names)
            twice = min(name for name in counts if counts[name] > 1)
            refuse(f"device {twice} is listed twice in the cluster")

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, node by node."""
        return tuple(device for node in self.nodes for device in node.devices)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of memory of each device, by its name."""
        return {device.name: device.memory for device in self.devices}

    def device(self, name: str) -> Device:
        """The device of this name. Raises Invalid where there is none."""
        for device in self.devices:
            if device.name == name:
                return device
        return refuse(f"device {name!r} is not in the cluster")

    @cached_property
    def _special(self) -> dict[str, Node]:
        """The nodes that have islands or links of their own."""
        return {node.name: node for node in self.nodes if node.island or node.inside or node.within}

    def inner(self, node: Node) -> tuple[Link, Link]:
        """The links of a node: within an island, between its islands. Without islands they are one."""
        inside = node.inside or self.inside
        within = node.within or self.within or inside
        return (within if node.island else inside), inside

    def reach(self, devices: Iterable[str]) -> Link:
        """The slowest link among some devices: by the level that they span."""
        names = list(devices)
        first = node_of(names[0]) if names else ""
        # The last one says so soonest of two groups.
        if any(node_of(name) != first for name in reversed(names)):
            return self.between
        node = self._special.get(first)
        if node is None:
            return self.inside
        within, inside = self.inner(node)
        return within if len({node.island_of(name) for name in names}) == 1 else inside

    def local_links(self, device: str) -> tuple[Link, Link, int] | None:
        """The links of a device's node and the device's island, where the node has islands or own links."""
        node = self._special.get(node_of(device))
        return None if node is None else (*self.inner(node), node.island_of(device))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Every link that two devices may talk over, the cluster's own first."""
        inner = (link for node in self._special.values() for link in self.inner(node))
        return tuple(dict.fromkeys((self.inside, self.between, *inner)))


def rate_of(rates: Rates, device: str) -> float:
    """How many times slower than normal a device is: `NORMAL` where `rates` does not name it."""
    return rates.get(device, NORMAL)


def check_rates(rates: Rates, cluster: Cluster) -> None:
    """Refuses rates of unknown devices and rates below 0.1 (most likely an error of units)."""
    known = {device.name for device in cluster.devices}
    for name, rate in rates.items():
        if name not in known:
            refuse(f"rates: {name!r} is not a device of the cluster")
        if not rate >= LEAST_RATE:
            refuse(
                f"rates: {name} has rate {rate}, below {LEAST_RATE:g}; a rate is how many times slower than "
                "normal (1.0 normal)"
            )
