"""Context parallelism: the devices that may share a sequence, and which heads each of them computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

from elasticd_planner.batching.token_spans import Spans, joined, overlaps
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.model import ModelSpec, unit_range
from elasticd_planner.spec.plan import Stage


class ContextMember(NamedTuple):
    """A device of a stage and the heads that it computes, as ranges [start, stop) of those of the model."""

    device: str
    lane: int
    heads: tuple[int, int]
    kv_heads: tuple[int, int]


class ContextPart(NamedTuple):
    """Tensors of tokens [start, stop) of a sequence: of keys and values for the kv-heads [first, last), or of
    queries for these heads."""

    sequence: int  #: see `ContextExchange.sequences`
    start: int
    stop: int
    first: int
    last: int

    @property
    def size(self) -> int:
        """Tokens times heads."""
        return (self.stop - self.start) * (self.last - self.first)


class ContextMembers:
    """The devices of a stage in the order of the plan, with the heads that each computes in a layer."""

    def __init__(self, members: Sequence[ContextMember], each: int, *, replicas: bool = False) -> None:
        """
        Args:
            members: the devices.
            each: query heads that a kv-head serves.
            replicas: the members of a lane all compute all of the attention, and some lane has several.
        """
        self.members, self.each, self.replicas = tuple(members), each, replicas
        self.index = {member.device: at for at, member in enumerate(self.members)}
        self.nodes = tuple(node_of(member.device) for member in self.members)  #: by member
        self.heads = max(member.heads[1] for member in self.members)  #: of the model
        self._of_lane: dict[int, list[int]] = defaultdict(list)
        for at, member in enumerate(self.members):
            self._of_lane[member.lane].append(at)
        self._sources: dict[tuple[int, int], Mapping[int, Spans]] = {}

    def of_lane(self, lane: int) -> list[int]:
        """The members of a lane."""
        return self._of_lane[lane]

    def served(self, source: int, taker: int) -> Spans:
        """The kv-heads whose keys a device gets from a certain one of another lane."""
        key = self.members[source].lane, taker
        if key not in self._sources:
            self._sources[key] = self._sources_of(*key)
        return self._sources[key].get(source, [])

    def _sources_of(self, lane: int, taker: int) -> Mapping[int, Spans]:
        """From which devices of a lane another device gets its kv-heads: of those that hold one, from one of
        its own node, if there is any; devices of a lane take turns."""
        members, holders = self.members, self.of_lane(lane)
        turn = sum(member.lane == members[taker].lane for member in members[:taker])
        found: dict[int, Spans] = {}
        for cell in self.cells([members[taker].kv_heads], [members[at].kv_heads for at in holders]):
            chosen = self.holder(holders, cell, self.nodes[taker], turn)
            found[chosen] = joined([*found.get(chosen, []), cell])
        return found

    def cells(self, wanted: Spans, held: Spans) -> Iterator[tuple[int, int]]:
        """The kv-heads that are wanted, in ranges that no border of a range runs through."""
        edges = sorted({edge for span in (*wanted, *held) for edge in span})
        for first, last in pairwise(edges):
            if overlaps([(first, last)], wanted):
                yield first, last

    def holder(self, holders: Sequence[int], cell: tuple[int, int], node: str, turn: int) -> int:
        """Which of some devices sends keys of some kv-heads: one of this node, if any there has them."""
        holding = [at for at in holders if overlaps([cell], [self.members[at].kv_heads])]
        near = [at for at in holding if self.nodes[at] == node] or holding
        return near[turn % len(near)]


def context_members(spec: ModelSpec, stage: Stage, device: str, heads: int, kv_heads: int) -> ContextMembers:
    """The devices of a stage and the heads of each, as follows from what one of them computes in a layer.

    A member computes some of the heads if a kind of units says so: kv-heads that follow heads, or heads alone.
    Else each member computes all of them.

    Args:
        spec: of the model.
        stage: with all its lanes.
        device: one of its devices.
        heads: query heads that the device computes in this layer.
        kv_heads: kv-heads of it, likewise; as many as heads where these do not divide (`UnitsOf`).
    """
    for kind, kv_kind in _kinds(spec):
        members = _cut_members(spec, stage, kind, kv_kind)
        mine = next(member for member in members if member.device == device)
        each = spec.units_of(kind).count // spec.units_of(kv_kind).count
        whole = all(edge % each == 0 for edge in mine.heads)
        if (heads, kv_heads) == (_size(mine.heads), _size(mine.kv_heads if whole else mine.heads)):
            return ContextMembers(members, each)
    return ContextMembers(
        [
            ContextMember(name, number, (0, heads), (0, kv_heads))
            for number, lane in enumerate(stage.by_lane)
            for name in lane.devices
        ],
        heads // kv_heads,
        replicas=max(stage.widths) > 1,
    )


def attention_members(spec: ModelSpec, stage: Stage) -> tuple[ContextMembers, int] | None:
    """The devices of a stage, as far as the model's units say what its attention is, and the size of a head;
    None: no units are said to be heads.

    Args:
        spec: of the model.
        stage: with all its lanes.
    """
    for kind, kv_kind in _kinds(spec):
        count = spec.units_of(kv_kind).count
        sizes = [
            parameter.shape[parameter.cut.dim] // count
            for parameter in chain.from_iterable(spec.kinds)
            if parameter.cut is not None and parameter.cut.units == kv_kind
        ]
        if sizes and (kind != kv_kind or "head" in kind):
            each = spec.units_of(kind).count // count
            return ContextMembers(_cut_members(spec, stage, kind, kv_kind), each), min(sizes)
    return None


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _kinds(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """The kinds of units that may be of heads and of their kv-heads, those that are said to be first."""
    yield from ((units.follows, units.kind) for units in spec.units if units.follows is not None)
    experts = {each.cut.units for kind in spec.kinds for each in kind if each.experts and each.cut}
    alone = [units.kind for units in spec.units if units.follows is None and units.kind not in experts]
    yield from ((kind, kind) for kind in sorted(alone, key=lambda kind: "head" not in kind))


def _cut_members(spec: ModelSpec, stage: Stage, kind: str, kv_kind: str) -> list[ContextMember]:
    found = []
    for number, lane in enumerate(stage.by_lane):
        for position, device in enumerate(lane.devices):
            ranges = (unit_range(spec, each, lane.shares, position) for each in (kind, kv_kind))
            heads, kv_heads = ((units.start, units.stop) for units in ranges)
            found.append(ContextMember(device, number, heads, kv_heads))
    return found


class ContextRelay(NamedTuple):
    """Keys of one lane for several devices of another node: they go there once, and are passed on."""

    lane: int  #: whose keys
    first: int  #: kv-heads [first, last)
    last: int
    source: int  #: which member sends them
    entry: int  #: which member of the other node gets them, and passes them on
    takers: tuple[int, ...]  #: those of that node that need them, `entry` among them


@lru_cache(maxsize=256)
def context_relays(members: ContextMembers, lanes: tuple[int, ...]) -> tuple[ContextRelay, ...]:
    """All that goes between nodes for a sequence of these lanes. Lanes of a node take turns, so that each has a
    part of what comes to the node."""
    sharing = [at for at, member in enumerate(members.members) if member.lane in lanes]
    turns: dict[str, int] = {}
    found = []
    for lane in lanes:
        holders = members.of_lane(lane)
        home = members.nodes[holders[0]]
        turn = turns[home] = turns.get(home, -1) + 1
        for node in dict.fromkeys(members.nodes[at] for at in sharing):
            near = [at for at in sharing if members.nodes[at] == node and members.members[at].lane != lane]
            wanted = [members.members[at].kv_heads for at in near]
            for cell in members.cells(wanted, [members.members[at].kv_heads for at in holders]):
                takers = [at for at in near if overlaps([cell], [members.members[at].kv_heads])]
                entry = takers[turn % len(takers)]
                source = members.holder(holders, cell, node, takers.index(entry))
                if members.nodes[source] != node:
                    found.append(ContextRelay(lane, *cell, source, entry, tuple(takers)))
    return tuple(found)
