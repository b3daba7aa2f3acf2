"""The communication between two layouts, in words: operations, slices, bytes by level of links, and seconds.

Steps are those of `resolve`; sums that would be relayed are made in two (`lowering`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from elasticd_planner.layout.resolve import Cell, Communication, Operation, resolve
from elasticd_planner.layout.two_step_sums import in_two_steps
from elasticd_planner.spec.box import TensorLayout
from elasticd_planner.spec.cluster import Cluster, node_of
from elasticd_planner.spec.model import item_size
from elasticd_planner.value import Value

#: Level of a link: among the devices of an island, of a node, or between nodes.
Level = str

_WORDS: dict[Operation, str] = {
    "keep": "keep",
    "zero": "zero",
    "send": "send",
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "sum": "sum",
    "relay": "send on",
}

#: Times that a ring of collectives goes round: each time each device but one waits for the one before it.
_HOPS: dict[Operation, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


class ExplainedOperation(Value, frozen=True, kw_only=True):
    """Operations of one kind, on slices of one shape, over one or several groups of devices."""

    operation: Operation
    hspmd: str  #: HSPMD's name of the operator; empty: it has none
    slices: int  #: how many there are
    shape: tuple[int, ...]  #: of each slice
    size: int  #: bytes of each slice
    groups: tuple[tuple[str, ...], ...]  #: of a send the first device is the source
    bytes: dict[Level, int] = msgspec.field(default_factory=dict)  #: that go over links, by level
    seconds: float | None = None  #: None: the cluster is not known

    def __str__(self) -> str:
        arrow = " > " if self.operation in ("send", "relay") else " "
        over = " ".join(f"{{{self._joined(group, arrow)}}}" for group in self.groups)
        kind, each = ("slice", ",") if self.slices == 1 else ("slices", " each,")
        what = f"{self.slices} {kind} of {list(self.shape)}, {readable(self.size)}{each}"
        text = f"{_WORDS[self.operation]}  {what} over {over}"
        if self.hspmd:
            text += f"   ({self.hspmd})"
        if self.seconds is not None and self.bytes:
            text += f"   {_moved(self.bytes)}, {self.seconds:.3g} s"
        return text

    def _joined(self, group: Sequence[str], arrow: str) -> str:
        return arrow.join((group[0], " ".join(group[1:]))) if len(group) > 1 else group[0]


class Explanation(Value, frozen=True, kw_only=True):
    """The communication between two layouts. `str` has a line for each kind of operation."""

    lines: tuple[ExplainedOperation, ...]

    @property
    def operators(self) -> tuple[str, ...]:
        """HSPMD's names of the operators, in order, each once; what stays in place is left out."""
        return tuple(dict.fromkeys(line.hspmd for line in self.lines if line.hspmd not in ("", "Identity")))

    @property
    def bytes(self) -> dict[Level, int]:
        """Bytes that go over links, by level."""
        total: dict[Level, int] = defaultdict(int)
        for line in self.lines:
            for level, size in line.bytes.items():
                total[level] += size
        return dict(total)

    @property
    def seconds(self) -> float | None:
        """Of all lines, one after the other; None where the cluster is not known."""
        known = [line.seconds for line in self.lines]
        return None if None in known else sum(seconds for seconds in known if seconds)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines)) or "nothing: both layouts are the same"


def explain(source: TensorLayout, target: TensorLayout, cluster: Cluster | None = None) -> Explanation:
    """The communication that makes one layout of a tensor another.

    Args:
        source: who holds what.
        target: who is to hold what.
        cluster: its links; with it there are seconds.

    Returns:
        The operations, with bytes by level of links: "between nodes", "inside nodes", "within islands". Bytes
        of collectives are those of a ring in the order of the devices. Seconds of a line are those of its
        busiest device, whose operations run one after the other.

    Raises:
        Uncovered: the target needs what no device holds.
        Invalid: the layouts are of different tensors, or say nothing that can be carried out.
    """
    lines: list[ExplainedOperation] = []
    before, hops = source, in_two_steps(source, target)
    for after in hops:
        found = _lines(before, after, cluster)
        lines += [line for line in found if len(hops) == 1 or line.operation != "keep"]
        before = after
    return Explanation(lines=tuple(lines))


def traffic(step: Communication, cell: Cell) -> Iterator[tuple[str, str, int]]:
    """The elements of one cell that go from device to device: (from, to, count)."""
    count, devices = cell.box.size, step.devices
    if step.operation in ("send", "relay"):
        for device in cell.needers:
            yield devices[0], device, count
    elif step.operation == "sum":
        for device in cell.sources:
            if device not in cell.needers:
                yield device, cell.needers[0], count
    elif step.operation == "all_reduce":  # each of the ring's links carries all but a part, there and back
        for number, (one, other) in enumerate(_ring(devices)):
            lacks = count // len(devices) + (number < count % len(devices))
            yield one, other, 2 * (count - lacks)
    elif step.operation == "all_gather":
        for one, other in _ring(devices):
            if other != cell.sources[0]:
                yield one, other, count
    elif step.operation == "reduce_scatter":
        for one, other in _ring(devices):
            if one != cell.needers[0]:
                yield one, other, count


def level_of(one: str, other: str, cluster: Cluster | None = None) -> Level:
    """The level of the link between two devices."""
    if node_of(one) != node_of(other):
        return "between nodes"
    local = [cluster.local_links(device) for device in (one, other)] if cluster else []
    islands = {link[2] for link in local if link is not None and link[0] != link[1]}
    return "within islands" if len(islands) == 1 else "inside nodes"


def readable(size: float) -> str:
    """Bytes for people: "4 MiB"."""
    units = iter(("bytes", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"


def _ring(devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from pairwise((*devices, devices[0]))


def _moved(by_level: dict[Level, int]) -> str:
    return " and ".join(f"{readable(size)} {level}" for level, size in by_level.items())


def _lines(source: TensorLayout, target: TensorLayout, cluster: Cluster | None) -> Iterator[ExplainedOperation]:
    """Steps of like operations on slices of one shape are a line."""
    size = item_size(source.dtype) if source.dtype != "any" else 1
    alike: dict[tuple[Operation, str, tuple[int, ...]], list[tuple[Communication, Cell]]] = {}
    order: dict[Operation, int] = {}
    for step in resolve(source, target):
        name = _hspmd(step, source, target)
        order.setdefault(step.operation, len(order))
        for cell in step.cells:
            alike.setdefault((step.operation, name, cell.box.shape), []).append((step, cell))
    for (operation, name, shape), found in sorted(alike.items(), key=lambda item: order[item[0][0]]):
        moved = [hop for step, cell in found for hop in traffic(step, cell)]
        by_level: dict[Level, int] = defaultdict(int)
        for one, other, count in moved:
            by_level[level_of(one, other, cluster)] += count * size
        yield ExplainedOperation(
            operation=operation,
            hspmd=name,
            slices=len(found),
            shape=shape,
            size=found[0][1].box.size * size,
            groups=tuple(dict.fromkeys(step.devices for step, _ in found)),
            bytes=dict(by_level),
            seconds=_seconds(found, size, cluster) if cluster else None,
        )


def _seconds(found: Sequence[tuple[Communication, Cell]], size: int, cluster: Cluster) -> float:
    """What the busiest device takes: its operations one after the other, what it sends and what it receives
    beside each other. A ring is as quick as its slowest link."""
    moved: dict[Communication, dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
    for step, cell in found:
        for one, other, count in traffic(step, cell):
            moved[step][one, other] += count * size
    together: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    received: dict[str, float] = defaultdict(float)
    for step, links in moved.items():
        hops = _HOPS.get(step.operation, 0) * (len(step.devices) - 1)
        if hops:
            link = cluster.reach(step.devices)
            for device in step.devices:
                together[device] += hops * link.latency + max(links.values()) / link.bandwidth
        else:
            for (one, other), count in links.items():
                taken = cluster.reach((one, other)).seconds(count)
                sent[one] += taken
                received[other] += taken
    devices = {*together, *sent, *received}
    return max((together[d] + max(sent[d], received[d]) for d in devices), default=0.0)


def _hspmd(step: Communication, source: TensorLayout, target: TensorLayout) -> str:
    """HSPMD's name of an operator. "Split": the members hold unlike boxes, so that slices of these have groups
    of their own; on boxes that all members have it is the plain collective."""
    cells, members = {cell.box for cell in step.cells}, set(step.devices)
    size = sum(box.size for box in cells)

    def only(layout: TensorLayout, devices: Iterable[str]) -> bool:
        """Whether what these devices hold is the step's cells alone."""
        wanted = set(devices)
        held = [holding.box for holding in layout.holdings if holding.device in wanted]
        return all(box.size == size and all(box.contains(cell) for cell in cells) for box in held)

    split = "Split"
    if step.operation == "keep":
        return "Identity" if only(source, members) and only(target, members) else ""
    if step.operation == "send":
        one_to_one = (
            len(step.devices) == 2 and only(source, step.devices[:1]) and only(target, step.devices[1:])
        )
        return "SR" if one_to_one else "BSR"
    if step.operation == "all_reduce":
        return "AR" if only(source, members) else split + "AR"
    if step.operation == "reduce_scatter":
        return "RS" if only(source, members) else split + "RS"
    if step.operation == "all_gather":
        return "AG" if only(target, members) else split + "AG"
    return ""
