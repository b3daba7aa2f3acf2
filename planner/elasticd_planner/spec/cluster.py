"""The cluster that a plan is made for: nodes, devices, links by level, and how slow each device is.

Links form a hierarchy. The levels, the nearest first, are: an island of a node (`Node.island`), a node, and any
number of further levels that join nodes (`Cluster.levels`: rack, rail group, pod), and the network between all
nodes. Two devices talk over the link of the nearest level that has both in one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec

from elasticd_planner.value import Value, refuse

NORMAL = 1.0

#: A smaller rate is most likely an error of units.
LEAST_RATE = 0.1

#: The levels that have names of their own: an island of a node, a node, the network between nodes.
NAMED_LEVELS = ("island", "node", "network")

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
    """The cost of one hop: bandwidth in bytes per second, latency in seconds. Where nothing is known, about
    half as fast as gloo between two processes of a host: 138 us for 4 KiB, 2.1 GB/s at 1 MiB."""

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


class Level(Value, frozen=True, kw_only=True, dict=True):
    """A level of links between node and network: groups of nodes that have a link of their own among them."""

    #: What the level is called: "rack", "rail group", "pod".
    name: str
    #: The link between two nodes of one group.
    link: Link
    #: The names of the nodes of each group. A node that no group names is alone at this level.
    groups: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.name or self.name in NAMED_LEVELS:
            refuse(f"level {self.name!r} must have a name that is none of {', '.join(NAMED_LEVELS)}")
        counts = Counter(node for group in self.groups for node in group)
        if twice := sorted(node for node, count in counts.items() if count > 1):
            refuse(f"level {self.name}: node {twice[0]} is named twice; a node is in one group of a level")
        if not all(self.groups):
            refuse(f"level {self.name}: a group without nodes; leave it out")

    @cached_property
    def group_of(self) -> dict[str, int]:
        """The group of each node that is named, by its place in `groups`."""
        return {node: place for place, group in enumerate(self.groups) for node in group}


#: A group of devices at one level of links, by its name: (level, group). Level 0 is the device itself, then
#: come islands, nodes, and the cluster's own levels.
Place = tuple[int, str]

#: The level of nodes.
NODE = 2


class Cluster(Value, frozen=True, kw_only=True, dict=True):
    """The nodes of one job, and the links by level: `within` an island of a node (None: as inside), `inside` a
    node, `levels` that join some of the nodes, the nearest first, `between` nodes that no level joins. A node
    may have links of its own."""

    nodes: tuple[Node, ...]
    inside: Link = Link()
    between: Link = Link()
    within: Link | None = None
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        names = [device.name for node in self.nodes for device in node.devices]
        if len({*names}) < len(names):
            counts = Counter(names)
            twice = min(name for name in counts if counts[name] > 1)
            refuse(f"device {twice} is listed twice in the cluster")
        check_levels(self.levels)

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

    def without(self, devices: Iterable[str], used: Mapping[str, int] | None = None) -> Cluster | None:
        """The cluster without some devices, and with less memory on others; None where nothing is left.

        Args:
            devices: by name, those that are left out.
            used: bytes of others that are not there any more; a device without memory is left out, too.
        """
        away, used, nodes = {*devices}, used or {}, []
        for node in self.nodes:
            left = tuple(
                msgspec.structs.replace(device, memory=device.memory - used.get(device.name, 0))
                for device in node.devices
                if device.name not in away and device.memory > used.get(device.name, 0)
            )
            if left:
                nodes.append(msgspec.structs.replace(node, devices=left))
        names, levels = {node.name for node in nodes}, []
        for level in self.levels:
            groups = (tuple(name for name in group if name in names) for group in level.groups)
            levels.append(msgspec.structs.replace(level, groups=tuple(filter(None, groups))))
        return msgspec.structs.replace(self, nodes=tuple(nodes), levels=tuple(levels)) if nodes else None

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
            return self.join(map(node_of, names)) if self.levels else self.between
        node = self._special.get(first)
        if node is None:
            return self.inside
        within, inside = self.inner(node)
        return within if len({node.island_of(name) for name in names}) == 1 else inside

    def local_links(self, device: str) -> tuple[Link, Link, int] | None:
        """The links of a device's node and the device's island, where the node has islands or own links."""
        node = self._special.get(node_of(device))
        return None if node is None else (*self.inner(node), node.island_of(device))

    def join(self, nodes: Iterable[str]) -> Link:
        """The slowest link among different nodes: that of the nearest level that has them all in one group."""
        names = {*nodes}
        for level in self.levels:
            groups = {level.group_of.get(name) for name in names}
            if len(groups) == 1 and None not in groups:
                return level.link
        return self.between

    @cached_property
    def joined(self) -> tuple[Node, ...]:
        """All nodes, those that a level joins next to each other; else in the order of `nodes`."""
        if not self.levels:
            return self.nodes
        first: dict[Place, int] = {}  # the first node of each group
        ways = []
        for at, node in enumerate(self.nodes):
            groups = self.joining(f"{node.name}/0")
            ways.append([first.setdefault(group, at) for group in reversed(groups)])
        return tuple(self.nodes[at] for at in sorted(range(len(ways)), key=lambda at: (ways[at], at)))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Every link that two devices may talk over, the cluster's own first."""
        inner = (link for node in self._special.values() for link in self.inner(node))
        joining = (level.link for level in self.levels)
        return tuple(dict.fromkeys((self.inside, self.between, *joining, *inner)))

    def places(self, device: str) -> tuple[Place, ...]:
        """The groups that a device is in, the nearest first: itself, its island, its node, its group of each
        further level. All devices have as many; two devices meet at the first place that they share."""
        if device not in self._places:
            name = node_of(device)
            node = self._special.get(name)
            island = f"{name} {node.island_of(device)}" if node is not None and node.island else name
            self._places[device] = (0, device), (1, island), (NODE, name), *self.joining(device)
        return self._places[device]

    @cached_property
    def _places(self) -> dict[str, tuple[Place, ...]]:
        return {}

    def joining(self, device: str) -> tuple[Place, ...]:
        """The group that a device is in at each further level, the nearest first."""
        name = node_of(device)
        return tuple(
            (at, name if (group := level.group_of.get(name)) is None else f"{level.name} {group}")
            for at, level in enumerate(self.levels, NODE + 1)
        )

    def exit(self, device: str, level: int) -> Link:
        """The link over which a device's group of a level is reached from the other groups of the next one."""
        name = node_of(device)
        if level < NODE:
            node = self._special.get(name)
            return self.inside if node is None else self.inner(node)[level]
        return self.levels[level - NODE].link if level - NODE < len(self.levels) else self.between


def check_levels(levels: Sequence[Level]) -> None:
    """Refuses two levels of one name, and a group that does not lie in one group of the next level."""
    names = [level.name for level in levels]
    if len({*names}) < len(names):
        refuse(f"levels: two are called {max(names, key=names.count)!r}; each has a name of its own")
    for near, far in pairwise(levels):
        for group in near.groups:
            groups = {far.group_of.get(node) for node in group}
            if len(groups) > 1 or (None in groups and len(group) > 1):
                nodes = ", ".join(group)
                refuse(
                    f"levels: the nodes {nodes} are one group of level {near.name}, and not of level "
                    f"{far.name}; list levels from the nearest on, each group inside one of the next level"
                )


def rate_of(rates: Rates, device: str) -> float:
    """The slowdown of a device: `NORMAL` where `rates` does not name it."""
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
