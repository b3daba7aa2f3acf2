"""The cluster that a plan is made for: nodes, devices, links, and how slow each device is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from elasticd_planner.value import Value, refuse

NORMAL = 1.0
DEAD = math.inf

#: How many times slower than normal each device is (1.0 normal, inf dead); a device not named is normal.
Rates = Mapping[str, float]


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
        return self.name.rpartition("/")[0]


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
    """One machine and its devices, which share its inner link."""

    name: str
    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        for device in self.devices:
            if device.node != self.name:
                refuse(f"device {device.name} is listed under node {self.name!r}")


class Cluster(Value, frozen=True, kw_only=True):
    """The nodes of one job, with the link inside a node and the link between nodes."""

    nodes: tuple[Node, ...]
    inside: Link = Link()
    between: Link = Link()

    def __post_init__(self) -> None:
        counts = Counter(device.name for device in self.devices)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            refuse(f"device {twice[0]} is listed twice in the cluster")

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for node in self.nodes for device in node.devices)

    def device(self, name: str) -> Device:
        for device in self.devices:
            if device.name == name:
                return device
        return refuse(f"device {name!r} is not in the cluster")

    def link(self, a: str, b: str) -> Link:
        """The link between two devices, by their names."""
        return self.inside if a.rpartition("/")[0] == b.rpartition("/")[0] else self.between


def check_rates(rates: Rates, cluster: Cluster) -> None:
    """Refuses rates of unknown devices and rates below 0.1 (most likely an error of units)."""
    known = {device.name for device in cluster.devices}
    for name, rate in rates.items():
        if name not in known:
            refuse(f"rates: {name!r} is not a device of the cluster")
        if not rate >= 0.1:
            refuse(f"rates: {name} has rate {rate}; a rate is how many times slower than normal (1.0 normal)")
