"""A reduction lowered to link levels over a flat one, played message by message: rows of `layouts`.

Each device has a port to the links of its node, each node a network card, each rack an uplink; in and out are
two. A message takes all that are on its way, each for its bytes over that one's bandwidth. It begins when all
of them are free, and is there after the slowest of these and its latency. Rings are played hop by hop: a device
passes a part on when it has come and the receiver takes part. A device begins a step of a bucket when its last
one is done. No price of the planner's is asked.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from _results import Row, row
from elasticd_planner.layout.lowering import BucketStep, phases
from elasticd_planner.spec.cluster import Cluster, Device, Level, Link, Node

#: Inside a node (NVLink), of its network card, and beyond the rack: bytes a second, and seconds.
INSIDE, CARD, UPLINK = (
    Link(bandwidth=2e11, latency=1e-5),
    Link(bandwidth=2.5e10, latency=2e-5),
    Link(bandwidth=2.5e10, latency=4e-5),
)

#: Bytes of a bucket of float32 gradients.
BUCKETS = (64 << 10, 1 << 20, 25 << 20, 256 << 20, 1 << 30)
FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class Network:
    """Where devices are: of each the node, of each node the rack (none: one network). `cards`: whether each
    device has a network card of its own."""

    node: dict[str, str]
    rack: dict[str, str]
    cards: bool = False

    def way(self, source: str, destination: str) -> tuple[list[tuple[str, float]], float]:
        """(resource, its bandwidth) on the way, and the latency."""
        way = [(f"out {source}", INSIDE.bandwidth), (f"in {destination}", INSIDE.bandwidth)]
        here, there = self.node[source], self.node[destination]
        if here == there:
            return way, INSIDE.latency
        ends = (source, destination) if self.cards else (here, there)
        way += [(f"card out {ends[0]}", CARD.bandwidth), (f"card in {ends[1]}", CARD.bandwidth)]
        if self.rack.get(here) == self.rack.get(there):
            return way, CARD.latency
        way += [(f"up {self.rack[here]}", UPLINK.bandwidth), (f"down {self.rack[there]}", UPLINK.bandwidth)]
        return way, UPLINK.latency


@dataclass(kw_only=True)
class Player:
    """The messages of one bucket's steps, in the order in which they can begin."""

    network: Network
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def play(self, steps: Sequence[BucketStep]) -> float:
        """Seconds until the last device is done."""
        order: dict[str, list[int]] = defaultdict(list)
        for number, step in enumerate(steps):
            for device in step.devices:
                order[device].append(number)
        runs = [_Ring(step) for step in steps]
        queue: list[tuple[float, int, int, int, int]] = []
        count = itertools.count()

        def offer(number: int, at: int, hop: int, when: float) -> None:
            """A device could send: it does once the receiver has come to the collective, too."""
            run = runs[number]
            after = (at + 1) % run.size
            if run.here[after] == math.inf:
                run.waiting[after].append((at, hop, when))
                return
            heapq.heappush(queue, (max(when, run.here[after]), next(count), number, at, hop))

        def begin(device: str, when: float) -> None:
            """The device comes to its next step."""
            if order[device]:
                number = order[device].pop(0)
                at = steps[number].devices.index(device)
                for hop in runs[number].arrive(at, when):
                    offer(number, at, hop, when)
                for sender, hop, since in runs[number].waiting.pop(at, ()):
                    offer(number, sender, hop, max(since, when))

        for device in list(order):
            begin(device, 0.0)
        last = 0.0
        while queue:
            when, _, number, at, hop = heapq.heappop(queue)
            run = runs[number]
            there = self._send(run, at, hop, when)
            last = max(last, there)
            after = (at + 1) % run.size
            for further in run.came(after, hop, there):
                offer(number, after, further, max(there, run.here[after]))
            for done in (at, after):
                if (end := run.ended(done, at, hop, there)) is not None:
                    begin(run.step.devices[done], end)
        return last

    def _send(self, run: _Ring, at: int, hop: int, when: float) -> float:
        source, destination = run.step.devices[at], run.step.devices[(at + 1) % run.size]
        way, latency = self.network.way(source, destination)
        size = run.bytes_of(at, hop)
        start = max(when, *(self.free[name] for name, _ in way))
        for name, bandwidth in way:
            self.free[name] = start + size / bandwidth
        return start + latency + size / min(bandwidth for _, bandwidth in way)


class _Ring:
    """One collective: who has come to it, and which parts have arrived."""

    def __init__(self, step: BucketStep) -> None:
        self.step, self.size = step, len(step.devices)
        self.hops = (2 if step.operation == "all_reduce" else 1) * (self.size - 1)
        self.here = [math.inf] * self.size
        #: By receiver who waits for it: (sender, hop, since).
        self.waiting: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        self._got: list[dict[int, float]] = [{} for _ in range(self.size)]
        self._sent = [0] * self.size
        self._end = [0.0] * self.size
        lengths = [sum(stop - start for start, stop in ranges) for ranges in step.ranges]
        if step.operation == "all_reduce":
            n = lengths[0]
            lengths = [(at + 1) * n // self.size - at * n // self.size for at in range(self.size)]
        self._lengths = lengths

    def bytes_of(self, at: int, hop: int) -> int:
        """Of what a device sends in a hop: a reduce-scatter's part i comes last to device i."""
        scatters = self.step.operation != "all_gather" and hop < self.size - 1
        if scatters:
            return self._lengths[(at - 1 - hop) % self.size] * FLOAT
        gathered = hop if self.step.operation == "all_gather" else hop - (self.size - 1)
        return self._lengths[(at - gathered) % self.size] * FLOAT

    def arrive(self, at: int, when: float) -> list[int]:
        """The device comes to the collective: hops that it can begin."""
        self.here[at] = when
        self._end[at] = when
        return [0, *(hop + 1 for hop in sorted(self._got[at]) if hop + 1 < self.hops)]

    def came(self, at: int, hop: int, when: float) -> list[int]:
        """A part of a hop comes to a device: the hops that it can begin now, where it takes part already."""
        self._got[at][hop] = when
        return [hop + 1] if hop + 1 < self.hops and self.here[at] < math.inf else []

    def ended(self, device: int, sender: int, hop: int, when: float) -> float | None:
        """When a device is done, if this message was its last."""
        if device == sender:
            self._sent[device] += 1
        self._end[device] = max(self._end[device], when)
        all_sent, all_got = self._sent[device] == self.hops, len(self._got[device]) == self.hops
        return self._end[device] if all_sent and all_got else None


def cluster(sizes: Sequence[int], racks: int = 0) -> tuple[Cluster, Network]:
    """Nodes of these sizes, `racks` of them in a rack: for the planner, and for the player."""
    names = [f"n{n}" for n in range(len(sizes))]
    nodes = tuple(
        Node(name=name, devices=tuple(Device(name=f"{name}/{i}", memory=1) for i in range(size)))
        for name, size in zip(names, sizes, strict=True)
    )
    groups = [tuple(names[at : at + racks]) for at in range(0, len(names), racks)] if racks else []
    here = Cluster(
        nodes=nodes,
        inside=INSIDE,
        between=UPLINK if racks else CARD,
        levels=(Level(name="rack", link=CARD, groups=tuple(groups)),) if racks else (),
    )
    return here, Network(
        node={device.name: node.name for node in nodes for device in node.devices},
        rack={name: f"rack {at}" for at, group in enumerate(groups) for name in group},
    )


def flat(devices: Sequence[str], elements: int) -> tuple[BucketStep, ...]:
    """One ring over all, node by node."""
    return (BucketStep("all_reduce", tuple(devices), (((0, elements),),) * len(devices)),)


def ratios(sizes: Sequence[int], *, racks: int = 0, cards: bool = False) -> dict[int, float]:
    """By the bytes of a bucket the seconds of what `phases` says over those of one ring."""
    here, network = cluster(sizes, racks)
    network = Network(node=network.node, rack=network.rack, cards=cards)
    devices = [device.name for device in here.devices]
    found = {}
    for size in BUCKETS:
        elements = size // FLOAT
        made = phases(devices, elements, here, FLOAT)
        one = Player(network=network).play(flat(devices, elements))
        found[size] = Player(network=network).play(made) / one
    return found


def two_level_rows() -> Iterator[Row]:
    """Buckets of 64 KiB to 1 GiB, as `phases` reduces them, over one ring; the worst of them has the goal."""
    for title, goal, found in (
        ("two-level reduction over flat, 8 nodes x 8", True, ratios([8] * 8)),
        ("with a network card for each device", False, ratios([8] * 8, cards=True)),
        ("on nodes of 8, 8, 8, 8, 6, 6, 4 and 2", False, ratios([8, 8, 8, 8, 6, 6, 4, 2])),
        ("three levels: 4 racks of 4 nodes x 8", False, ratios([8] * 16, racks=4)),
    ):
        worst, least = max(found.values()), min(found.values())
        name = title if goal else f"two-level reduction over flat, {title}"
        text = f"{name}: buckets of 64 KiB to 1 GiB, the worst (the best: {least:.2f})"
        limit = {"goal": "<= 1.00", "met": worst <= 1.0} if goal else {}
        yield row(text, worst, "", kind="simulated", **limit)  # type: ignore[arg-type]
