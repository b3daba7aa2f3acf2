"""The communication between two layouts, in words: operations, slices, bytes by level of links, and seconds.

Steps are those of `resolve`; sums that would be relayed are made in two (`two_step_sums`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from elasticd_planner.layout.link_traffic import Flow, Level, busiest_seconds, bytes_by_level
from elasticd_planner.layout.resolve import Cell, Communication, Operation, resolve
from elasticd_planner.layout.two_step_sums import in_two_steps
from elasticd_planner.readable import readable
from elasticd_planner.spec.box import TensorLayout
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.model import item_size
from elasticd_planner.value import Value

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
        cells: dict[Communication, list[Cell]] = defaultdict(list)
        for step, cell in found:
            cells[step].append(cell)
        flows = [Flow(msgspec.structs.replace(step, cells=tuple(own)), size) for step, own in cells.items()]
        yield ExplainedOperation(
            operation=operation,
            hspmd=name,
            slices=len(found),
            shape=shape,
            size=found[0][1].box.size * size,
            groups=tuple(dict.fromkeys(step.devices for step, _ in found)),
            bytes=bytes_by_level(flows, cluster),
            seconds=busiest_seconds(flows, cluster) if cluster else None,
        )


def _hspmd(step: Communication, source: TensorLayout, target: TensorLayout) -> str:
    """HSPMD's name of an operator. "Split": the members hold unlike boxes, so that slices of these have groups
    of their own; on boxes that all members have it is the plain collective."""
    cells, members = {cell.box for cell in step.cells}, set(step.devices)
    size = sum(box.size for box in cells)

    def only(layout: TensorLayout, devices: Iterable[str]) -> bool:
        """Returns True if what these devices hold is the step's cells alone."""
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
