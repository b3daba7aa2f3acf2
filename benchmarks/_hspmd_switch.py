"""HSPMD's switch between two strategies, by each of its three choices of senders, and elasticd's (simulated).

Written anew from how its graph switching chooses (Hetu v2, arXiv 2504.20490; lhy101/HSPMD,
`switch_exec_graph.cc`). Each parameter is cut into the slices of both strategies. Of each slice the devices
that need it and lack it are served one after the other: by the first owner; by the owners in turn, those of
the receiver's node first; or by the owner that has sent the fewest elements so far, of the receiver's node
where there is one. Only the senders differ: all send what is lacking, once. So the fused choice moves the
volume of the unfused one, as the paper says. The paper's own ratios of the three are in images that could not
be read: they are not compared with these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from elasticd_migration.reshard import bytes_lacking, reshard
from elasticd_planner.layout.holdings import Holdings
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.layout.resolve import demands
from elasticd_planner.layout.surviving_layouts import SurvivingLayouts
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Plan

#: Bytes of an element: of the value in bfloat16; of the master weight and two moments in float32.
VALUE, STATE = 2, 12


class Load(NamedTuple):
    """What a choice of senders puts on links."""

    moved: int  #: bytes in all
    nvlink: int  #: bytes that the busiest device sends inside its node
    infiniband: int  #: bytes that the busiest device sends to other nodes
    node: int  #: bytes that leave the busiest node


#: From a device to another, and bytes.
_Transfers = Iterator[tuple[str, str, int]]
#: Of a slice's owners the one that sends it to a device.
_Choose = Callable[[Sequence[str], str, int, int], str]


def ours(spec: ModelSpec, old: Plan, new: Plan, gone: Sequence[str]) -> tuple[Load, int]:
    """elasticd's load, and the least bytes that can move."""
    before, after = SurvivingLayouts(Layouts(spec, old), gone=gone), Layouts(spec, new)
    sizes = {item: STATE if item.role == "state" else VALUE for item in after.items}
    transfers = (
        (t.source, t.destination, t.box.size * sum(sizes[item] for item in t.items))
        for t in reshard(before, after, sizes)
    )
    return _load(transfers), sum(bytes_lacking(before, after, sizes).values())


def theirs(spec: ModelSpec, old: Plan, new: Plan, gone: Sequence[str]) -> Mapping[str, Load]:
    """The load of each of HSPMD's choices."""
    before, after = SurvivingLayouts(Layouts(spec, old), gone=gone), Layouts(spec, new)
    choices: dict[str, Callable[[], _Choose]] = {"first": _First, "turns": _Turns, "greedy": _Greedy}
    return {name: _load(_served(before, after, make())) for name, make in choices.items()}


def _served(before: Holdings, after: Holdings, choose: _Choose) -> _Transfers:
    for item in after.items:
        if item.role != "value":
            continue
        source, target = before.layout(item), after.layout(item)
        for box, (owners,), needers in demands(source, target):
            for number, device in enumerate(d for d in needers if d not in owners):
                yield choose(owners, device, number, box.size), device, box.size * (VALUE + STATE)


class _First:
    """The first owner."""

    def __call__(self, owners: Sequence[str], device: str, number: int, size: int) -> str:
        return owners[0]


class _Turns:
    """The owners of a slice in turn; who is of another node is passed over while one of the node is there."""

    def __call__(self, owners: Sequence[str], device: str, number: int, size: int) -> str:
        turn = [owners[(number + i) % len(owners)] for i in range(len(owners))]
        return next((owner for owner in turn if node_of(owner) == node_of(device)), turn[-1])


class _Greedy:
    """The owner that has sent the fewest elements, inside nodes and between them counted apart."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, bool], int] = defaultdict(int)

    def __call__(self, owners: Sequence[str], device: str, number: int, size: int) -> str:
        near = [owner for owner in owners if node_of(owner) == node_of(device)]
        owner = min(near or owners, key=lambda owner: self._sent[owner, bool(near)])
        self._sent[owner, bool(near)] += size
        return owner


def _load(transfers: _Transfers) -> Load:
    inside: dict[str, int] = defaultdict(int)
    outside: dict[str, int] = defaultdict(int)
    nodes: dict[str, int] = defaultdict(int)
    for source, destination, size in transfers:
        if node_of(source) == node_of(destination):
            inside[source] += size
        else:
            outside[source] += size
            nodes[node_of(source)] += size
    return Load(
        sum(inside.values()) + sum(outside.values()),
        *(max(each.values(), default=0) for each in (inside, outside, nodes)),
    )
