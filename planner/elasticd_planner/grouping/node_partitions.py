"""Ways to divide the devices of one node into TP groups: the candidates of the search, best first.

Nodes whose devices are alike in rate and memory are of one kind and share their candidates. Devices of a kind
count by class, so that a node of seven equal devices and a slow one has a few dozen divisions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from typing import cast

import numpy as np

from elasticd_planner.cost.group_bound import Paces, hull
from elasticd_planner.cost.memory import most_layers
from elasticd_planner.cost.model import CostModel, GroupCost
from elasticd_planner.grouping.best_partitions import BestPartitions, Taken, possible, tractable
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.cluster import Cluster, Device, Link, Node, Rates, rate_of

#: Groupings of a node that are listed at most: of few devices, and of many, where those that lead are added.
ENUMERATED, LISTED = 3000, 400

#: Divisions of a node that are kept for one time.
KEPT = 40

#: The largest part of a member, over an equal one, in groups that ask for less memory.
LEAN = (1.0, 1.2)

#: Kinds of nodes that a remembered partitioner may hold.
REMEMBERED = 400

#: How much longer than the bound a plan may be thought to take when groups are dropped that add nothing.
HOPE = 1.15

#: Divisions of one grouping that differ in shares, and how much slower than the fastest shares others may be.
VARIANTS, SLOWER = 4, 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupType:
    """TP groups that cost the same and hold the same are interchangeable."""

    cost: GroupCost
    shares: tuple[int, ...]
    #: Bytes of memory by member.
    memory: tuple[int, ...]

    @property
    def block(self) -> float:
        """Seconds (or units) of one layer on one micro-batch, forward and backward."""
        return self.cost.block

    @property
    def width(self) -> int:
        """Devices of the group."""
        return len(self.shares)

    def most_layers(self, cost: CostModel, layers: int, in_flight: int, *, first: bool) -> int:
        """The most layers, at most `layers`, that it holds as the `in_flight`-th stage from the end of a full
        pipeline."""
        last = in_flight == 1
        return most_layers(cost, self.shares, self.memory, layers, first=first, last=last, in_flight=in_flight)


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Groups of one node: their types, and of each its members' classes (indices into `NodeKind.classes`)."""

    types: tuple[GroupType, ...]
    members: tuple[tuple[int, ...], ...]


#: Classes, their islands, and the links of a kind of nodes.
Form = tuple[tuple[tuple[float, int, int], ...], tuple[int, ...], Link, Link]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """Nodes whose usable devices are alike: classes (rate, memory, how many), fast ones first, and the names
    of each node's devices by class."""

    classes: tuple[tuple[float, int, int], ...]
    nodes: tuple[tuple[tuple[str, ...], ...], ...]
    paces: Paces
    #: The link between two devices of one island, and of different ones.
    near: Link
    link: Link
    #: The island of each class; empty where islands make no difference.
    islands: tuple[int, ...] = ()
    #: Whether dead devices are missing from the nodes.
    lost: bool = False

    @property
    def form(self) -> Form:
        """The values that its divisions depend on."""
        return self.classes, self.islands, self.near, self.link

    def reach(self, members: Iterable[int]) -> Link:
        """The slowest link among devices of these classes."""
        if not self.islands:
            return self.near
        return self.near if len({self.islands[i] for i in members}) == 1 else self.link

    @property
    def rates(self) -> tuple[float, ...]:
        """Slowdowns of a node's devices, fast ones first."""
        return tuple(rate for rate, _, count in self.classes for _ in range(count))

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices of a node, by class."""
        return tuple(count for _, _, count in self.classes)

    @property
    def devices(self) -> int:
        """Usable devices of a node."""
        return sum(count for _, _, count in self.classes)

    @property
    def normal(self) -> bool:
        """True if no device of a node is dead or slow."""
        return not self.lost and all(rate <= 1.0 for rate, _, _ in self.classes)

    @property
    def speed(self) -> float:
        """A node's speed, in normal devices."""
        return sum(count / rate for rate, _, count in self.classes)


def kinds(cluster: Cluster, rates: Rates, cost: CostModel) -> tuple[NodeKind, ...]:
    """The kinds of nodes with at least one usable device, in the order of their first node. Where no node is
    large enough for the narrowest group, neighbouring nodes count as one."""
    found: dict[tuple[Form, bool], list[tuple[tuple[str, ...], ...]]] = {}
    dead = {d.node for d in cluster.devices if math.isinf(rate_of(rates, d.name))}
    named = {node.name: node for node in cluster.nodes}
    for devices, link in hosts(cluster, rates, cost):
        node = named[devices[0].node]
        near, link = (link, link) if len({d.node for d in devices}) > 1 else cluster.inner(node)
        islands = _islands(node, devices, rates) if near != link else {}
        alike: dict[tuple[float, int, int], list[str]] = {}
        for device in devices:
            place = (rate_of(rates, device.name), -device.memory, islands.get(device.name, 0))
            alike.setdefault(place, []).append(device.name)
        ordered = sorted(alike.items())
        classes = tuple((rate, -memory, len(names)) for (rate, memory, _), names in ordered)
        of = tuple(island for (_, _, island), _ in ordered) if islands else ()
        lost = any(device.node in dead for device in devices)
        key = ((classes, of, near, link), lost)
        found.setdefault(key, []).append(tuple(tuple(names) for _, names in ordered))
    return tuple(
        NodeKind(
            classes=classes,
            nodes=tuple(nodes),
            paces=cost.paces([rate for rate, _, count in classes for _ in range(count)], near),
            near=near,
            link=link,
            islands=of,
            lost=lost,
        )
        for ((classes, of, near, link), lost), nodes in found.items()
    )


def _islands(node: Node, devices: Sequence[Device], rates: Rates) -> dict[str, int]:
    """The island of each device, counted so that nodes with the same islands in another order are alike."""
    members: dict[int, list[Device]] = {}
    for device in devices:
        members.setdefault(node.island_of(device.name), []).append(device)

    def content(island: int) -> list[tuple[float, int]]:
        return sorted((rate_of(rates, device.name), -device.memory) for device in members[island])

    ranked = sorted(members, key=lambda island: (-len(members[island]), content(island), island))
    return {device.name: at for at, island in enumerate(ranked) for device in members[island]}


def hosts(cluster: Cluster, rates: Rates, cost: CostModel) -> list[tuple[tuple[Device, ...], Link]]:
    """The usable devices that a TP group may be made of: of each node, with its link. Nodes that a level of
    links joins are neighbours, so that what takes neighbouring nodes talks over the nearer link."""
    usable = [
        tuple(d for d in node.devices if math.isfinite(rate_of(rates, d.name))) for node in cluster.joined
    ]
    widest = max((len(devices) for devices in usable), default=0)
    if cost.widths(widest) or not cost.widths(1 << 30):
        return [(devices, cluster.inside) for devices in usable if devices]
    least = cost.widths(1 << 30)[0]
    joined: list[tuple[tuple[Device, ...], Link]] = []
    held: tuple[Device, ...] = ()
    for devices in usable:
        held += devices
        if len(held) >= least:
            joined.append((held, cluster.join({device.node for device in held})))
            held = ()
    return joined


class NodePartitioner:
    """Makes the candidates of node kinds; what is equal is made once, in this problem and, where the cost can
    be told from others, in later ones (`partitioner`)."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._types: dict[tuple[tuple[tuple[float, int], ...], Link], tuple[GroupType, ...]] = {}
        self._divided: dict[Form, list[Division]] = {}
        self._listed: dict[Form, _Listed] = {}
        self._programmes: dict[Form, BestPartitions] = {}
        self._chosen: dict[tuple[Form, int | None], Paces] = {}

    @property
    def size(self) -> int:
        """The number of kinds of nodes that it has divided."""
        return len(self._divided) + len(self._listed)

    def divisions(self, kind: NodeKind, time: float, *, size: int | None = None) -> tuple[Division, ...]:
        """The best divisions by their gain at T / L = `time`. With `size` given, a node of normal devices has
        one: groups of exactly that size."""
        if size is not None and kind.normal:
            return (next(self._made(kind, _equal(kind, size))),)
        if kind.form not in self._listed:
            self._listed[kind.form] = _Listed(self._promising(kind))
        return self._listed[kind.form].best(time, self.cost.timing.fill)

    def every(self, kind: NodeKind, *, size: int | None = None) -> Sequence[Division]:
        """All divisions of a node that can be listed; with `size` given, a node of normal devices has one."""
        if size is not None and kind.normal:
            return self.divisions(kind, 1.0, size=size)
        if kind.form not in self._divided:
            listed = islice(self._groupings(kind), ENUMERATED)
            self._divided[kind.form] = [d for g in listed for d in self._made(kind, g)]
        return self._divided[kind.form]

    def plain(self, kind: NodeKind, size: int) -> Division:
        """Groups of one size with equal shares: what a healthy node of that many devices would have."""
        groups = _equal(kind, size)
        types = [min(self.types_of(kind, members), key=lambda t: max(t.shares)) for members in groups]
        return Division(types=tuple(types), members=tuple(groups))

    def complete(self, kind: NodeKind, *, size: int | None = None) -> bool:
        """Returns True if among `every` is whatever can be best, each with its fastest shares."""
        return self.cost.exact_shares and len(self.every(kind, size=size)) < ENUMERATED

    def _promising(self, kind: NodeKind) -> Iterator[Division]:
        """All divisions, where they are few. Else some of these, and of each number of groups those that reach
        the most: with the fastest shares, and with shares that ask for less memory."""
        groupings = list(islice(self._groupings(kind), LISTED + 1))
        few, widths = len(groupings) <= LISTED, self.cost.widths(kind.devices)
        for groups in groupings:
            yield from self._made(kind, groups)
        if few or kind.islands or not tractable(kind.counts, widths):
            return
        yield from self._led(kind, self._leading(kind), None)
        for part in LEAN:
            taken = possible(kind.counts, widths)
            paces = [1 / self._lean(kind, _members(t), part).block for t in taken]
            yield from self._led(kind, BestPartitions(kind.counts, widths, taken, paces), part)

    def _led(self, kind: NodeKind, leading: BestPartitions, part: float | None) -> Iterator[Division]:
        for taken in leading.divisions():
            groups = list(map(_members, taken))
            if part is None:
                yield from self._made(kind, groups)
            else:
                yield _sorted([self._lean(kind, members, part) for members in groups], groups)

    def _lean(self, kind: NodeKind, members: tuple[int, ...], part: float) -> GroupType:
        """The fastest group in which no member has more than `part` times an equal share, or the least."""
        listed = self.types_of(kind, members)
        most = part / len(members)
        lean = [t for t in listed if max(t.shares) <= most * sum(t.shares) * (1 + 1e-9)]
        return min(lean, key=lambda t: t.block) if lean else min(listed, key=lambda t: max(t.shares))

    def _leading(self, kind: NodeKind) -> BestPartitions:
        """The programme of a kind, with the fastest shares."""
        if kind.form not in self._programmes:
            widths = self.cost.widths(kind.devices)
            taken = possible(kind.counts, widths)
            paces = [1 / self.types_of(kind, _members(t))[0].block for t in taken]
            self._programmes[kind.form] = BestPartitions(kind.counts, widths, taken, paces)
        return self._programmes[kind.form]

    def _neighbours_suffice(self, kind: NodeKind) -> bool:
        """Returns True if groups of neighbours in the order of rates are enough: shares are equal, and devices
        differ in nothing but their rates."""
        if kind.islands or len({memory for _, memory, _ in kind.classes}) > 1:
            return False
        return all(
            len(self.cost.shares((1.0, 2.0, *(1.0,) * w)[:w])) == 1 for w in self.cost.widths(kind.devices)
        )

    def choices(self, kind: NodeKind, *, size: int | None = None) -> Paces:
        """The values of a kind that the bound reads: the most that k groups reach in sum 1 / block. Where all
        groupings can be listed and shares are the best there are, it is what they reach; else what `paces`
        allows."""
        key = (kind.form, size if kind.normal else None)
        if key not in self._chosen:
            self._chosen[key] = self._choices(kind, size)
        return self._chosen[key]

    def _choices(self, kind: NodeKind, size: int | None) -> Paces:
        hidden = self.cost.timing.hidden
        if size is not None and kind.normal:
            made = self.divisions(kind, 1.0, size=size)[0]
            whole = (sum(1 / entry.block for entry in made.types), len(made.types), 0)
            return whole, (0.0, 0, len(made.types) if hidden else 0)  # groups, or none of them
        if self._programmable(kind):
            return hull(tuple(self._leading(kind).paces()), hidden)
        return hull(kind.paces, hidden)

    def _programmable(self, kind: NodeKind) -> bool:
        """Returns True if the programme says more than `paces`, and can be run."""
        if len(kind.classes) == 1 or not self.cost.exact_shares or self._neighbours_suffice(kind):
            return False
        return tractable(kind.counts, self.cost.widths(kind.devices))

    def _groupings(self, kind: NodeKind) -> Iterator[Sequence[tuple[int, ...]]]:
        """Neighbours in the order of rates, the slowest idle; then any, where these are not enough."""
        order = _members(kind.counts)
        widths = self.cost.widths(len(order))

        def every() -> Iterator[tuple[tuple[int, ...], ...]]:
            for used in range(len(order), 0, -1):
                yield from _neighbours(order[:used], widths)
            if not kind.normal:
                yield ()
            if len(kind.classes) > 1 and not self._neighbours_suffice(kind):
                yield from _any(kind.counts, possible(kind.counts, widths))

        seen: set[tuple[tuple[int, ...], ...]] = set()
        for made in every():
            key = tuple(sorted(made))
            if key not in seen:
                seen.add(key)
                yield made

    def _made(self, kind: NodeKind, groups: Sequence[tuple[int, ...]]) -> Iterator[Division]:
        """The divisions of one grouping: with the fastest shares, and with others that need less memory."""
        options = [self.types_of(kind, members) for members in groups]
        for types in islice(product(*options), VARIANTS):
            yield _sorted(types, groups)

    def types_of(self, kind: NodeKind, members: tuple[int, ...]) -> tuple[GroupType, ...]:
        """The group of these classes with each of the shares that is not slower and larger than another, the
        fastest first."""
        classes = tuple((kind.classes[i][0], kind.classes[i][1]) for i in members)
        link = kind.reach(members)
        if (classes, link) not in self._types:
            rates = tuple(rate for rate, _ in classes)
            memory = tuple(memory for _, memory in classes)
            found: list[GroupType] = []
            options = [(self.cost.group(rates, shares, link), shares) for shares in self.cost.shares(rates)]
            for cost, shares in sorted(options, key=lambda option: (option[0].block, max(option[1]))):
                largest = max(shares) / sum(shares)
                slower = found and cost.block > found[0].block * SLOWER
                if not slower and all(largest < max(t.shares) / sum(t.shares) for t in found):
                    found.append(GroupType(cost=cost, shares=shares, memory=memory))
            self._types[classes, link] = tuple(found)
        return self._types[classes, link]


class _Listed:
    """Divisions of one kind, each once, and their groups as arrays."""

    def __init__(self, divisions: Iterable[Division]) -> None:
        distinct = {made.types: made for made in reversed(list(divisions))}
        self.divisions = sorted(distinct.values(), key=lambda made: (len(made.types), made.members))
        sizes = [len(made.types) for made in self.divisions]
        self._owner = np.repeat(np.arange(len(sizes)), sizes)
        self._blocks: Floats = np.array([kind.block for made in self.divisions for kind in made.types])
        self._slowest = np.zeros(len(sizes))
        np.maximum.at(self._slowest, self._owner, self._blocks)

    def best(self, time: float, fill: int) -> tuple[Division, ...]:
        """Those with the largest gain at T / L = `time`. A group that adds nothing is left out, where it costs
        something (`Timing.fill`): the division without it is there too."""
        each = np.maximum(time / self._blocks - fill, 0.0)
        gains = np.bincount(self._owner, weights=each, minlength=len(self.divisions))
        allowed = fill * self._slowest <= time * HOPE
        order = np.argsort(np.where(allowed, -np.round(gains, 9), np.inf), kind="stable")
        return tuple(self.divisions[i] for i in order[: min(KEPT, int(allowed.sum()))])


def _members(taken: Taken) -> tuple[int, ...]:
    """The classes of the members of a group."""
    return tuple(i for i, count in enumerate(taken) for _ in range(count))


def _sorted(types: Sequence[GroupType], groups: Sequence[tuple[int, ...]]) -> Division:
    """A division of these groups, fast ones first."""
    made = sorted(zip(types, groups, strict=True), key=lambda entry: (entry[0].block, entry[1]))
    return Division(types=tuple(t for t, _ in made), members=tuple(members for _, members in made))


def partitioner(cost: CostModel) -> NodePartitioner:
    """A partitioner that remembers its results for an equal cost, if costs can be compared quickly (hashed)."""
    try:
        made = _remembered(cast(Hashable, cost))
    except TypeError:
        return NodePartitioner(cost)
    if made.size > REMEMBERED:
        _remembered.cache_clear()
    return made


@lru_cache(maxsize=4)
def _remembered(cost: Hashable) -> NodePartitioner:
    return NodePartitioner(cast(CostModel, cost))


def _equal(kind: NodeKind, size: int) -> list[tuple[int, ...]]:
    """Groups of one size: inside islands first, then of what these leave."""
    order = _members(kind.counts)
    parts = [order]
    if kind.islands:
        islands = sorted(set(kind.islands))
        parts = [tuple(i for i in order if kind.islands[i] == island) for island in islands]
    runs = [part[at : at + size] for part in parts for at in range(0, len(part) - size + 1, size)]
    left = [i for part in parts for i in part[len(part) - len(part) % size :]] if kind.islands else []
    return runs + [tuple(left[at : at + size]) for at in range(0, len(left) - size + 1, size)]


def _neighbours(order: tuple[int, ...], widths: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to cut a sequence into runs of these widths, wide runs first."""
    if not order:
        yield ()
        return
    for width in reversed(widths):
        if width <= len(order):
            for rest in _neighbours(order[width:], widths):
                yield (order[:width], *rest)


def _any(left: tuple[int, ...], takes: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every multiset of groups by class; `takes`: the devices by class that a group may have, in order."""
    yield ()
    for at, taken in enumerate(takes):
        rest = tuple(have - used for have, used in zip(left, taken, strict=True))
        members = _members(taken)
        after = [t for t in takes[at:] if all(n <= have for n, have in zip(t, rest, strict=True))]
        for others in _any(rest, after):
            yield (members, *others)
