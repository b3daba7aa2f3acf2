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

from elasticd_planner.bound import Choices, Paces, hull
from elasticd_planner.cluster import Cluster, Device, Link, Node, Rates
from elasticd_planner.cost import CostModel, GroupCost, rate_of

#: Divisions enumerated of a node at most, and kept.
ENUMERATED, KEPT = 3000, 40

#: Kinds of nodes that a remembered divider may hold.
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
        return self.cost.block

    @property
    def width(self) -> int:
        return len(self.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Groups of one node: their types, and of each its members' classes (indices into `NodeKind.classes`)."""

    types: tuple[GroupType, ...]
    members: tuple[tuple[int, ...], ...]

    def gain(self, time: float, *, steady: bool) -> float:
        """Micro-batches that the groups add at most where T / L is `time`."""
        if steady:
            return sum(time / kind.block for kind in self.types)
        return sum(max(0.0, time / kind.block - 1) for kind in self.types)


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
        """What its divisions depend on."""
        return self.classes, self.islands, self.near, self.link

    def reach(self, members: Iterable[int]) -> Link:
        """The slowest link among devices of these classes."""
        if not self.islands:
            return self.near
        return self.near if len({self.islands[i] for i in members}) == 1 else self.link

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(rate for rate, _, count in self.classes for _ in range(count))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(count for _, _, count in self.classes)

    @property
    def devices(self) -> int:
        return sum(count for _, _, count in self.classes)

    @property
    def normal(self) -> bool:
        return not self.lost and all(rate <= 1.0 for rate, _, _ in self.classes)

    @property
    def speed(self) -> float:
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
    made = []
    for ((classes, of, near, link), lost), nodes in found.items():
        listed = [rate for rate, _, count in classes for _ in range(count)]
        paces = cost.paces(listed, near)
        made.append(
            NodeKind(
                classes=classes,
                nodes=tuple(nodes),
                paces=paces,
                near=near,
                link=link,
                islands=of,
                lost=lost,
            )
        )
    return tuple(made)


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
    """The usable devices that a TP group may be made of: of each node, with its link."""
    usable = [tuple(d for d in node.devices if math.isfinite(rate_of(rates, d.name))) for node in cluster.nodes]
    widest = max((len(devices) for devices in usable), default=0)
    if cost.widths(widest) or not cost.widths(1 << 30):
        return [(devices, cluster.inside) for devices in usable if devices]
    least = cost.widths(1 << 30)[0]
    joined: list[tuple[tuple[Device, ...], Link]] = []
    held: tuple[Device, ...] = ()
    for devices in usable:
        held += devices
        if len(held) >= least:
            joined.append((held, cluster.between))
            held = ()
    return joined


class Divider:
    """Makes the candidates of node kinds; what is equal is made once, in this problem and, where the cost can
    be told from others, in later ones (`divider`)."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._types: dict[tuple[tuple[tuple[float, int], ...], Link], tuple[GroupType, ...]] = {}
        self._divided: dict[Form, list[Division]] = {}
        self._chosen: dict[tuple[Form, int | None], Choices] = {}
        self._costs: dict[tuple[tuple[float, ...], tuple[int, ...], Link], GroupCost] = {}

    @property
    def size(self) -> int:
        """How many kinds of nodes it has divided."""
        return len(self._divided)

    def divisions(
        self, kind: NodeKind, time: float, *, steady: bool, size: int | None = None
    ) -> tuple[Division, ...]:
        """The best divisions by their gain at T / L = `time`. With `size` given, a node of normal devices has
        one: groups of exactly that size."""
        if size is not None and kind.normal:
            return (next(self._made(kind, _equal(kind, size))),)
        best: dict[tuple[GroupType, ...], tuple[float, Division]] = {}
        if kind.form not in self._divided:
            self._divided[kind.form] = [d for g in self._groupings(kind) for d in self._made(kind, g)]
        for made in self._divided[kind.form]:
            if not steady and any(time * HOPE < made_type.block for made_type in made.types):
                continue  # a group that adds nothing: the division without it is there too
            gain = made.gain(time, steady=steady)
            known = best.get(made.types)
            if known is None or gain > known[0]:
                best[made.types] = (gain, made)
        ranked = sorted(best.values(), key=lambda entry: (-entry[0], len(entry[1].types), entry[1].members))
        return tuple(made for _, made in ranked[:KEPT])

    def every(self, kind: NodeKind, *, size: int | None = None) -> Sequence[Division]:
        """All divisions of a node that can be listed; with `size` given, a node of normal devices has one."""
        if size is not None and kind.normal:
            return self.divisions(kind, 1.0, steady=True, size=size)
        if kind.form not in self._divided:
            self._divided[kind.form] = [d for g in self._groupings(kind) for d in self._made(kind, g)]
        return self._divided[kind.form]

    def complete(self, kind: NodeKind, *, size: int | None = None) -> bool:
        """Whether among `every` is whatever can be best, each with its fastest shares."""
        return self.cost.exact_shares and len(self.every(kind, size=size)) < ENUMERATED

    def choices(self, kind: NodeKind, *, size: int | None = None) -> Choices:
        """What the bound reads of a kind: the most that k groups reach in sum 1 / block. Where all groupings
        can be listed and shares are the best there are, it is what they reach; else what `paces` allows."""
        key = (kind.form, size if kind.normal else None)
        if key not in self._chosen:
            self._chosen[key] = self._choices(kind, size)
        return self._chosen[key]

    def _choices(self, kind: NodeKind, size: int | None) -> Choices:
        hidden = self.cost.timing.hidden
        if size is not None and kind.normal:
            made = self.divisions(kind, 1.0, steady=False, size=size)[0]
            whole = (sum(1 / entry.block for entry in made.types), len(made.types), 0)
            return whole, (0.0, 0, len(made.types) if hidden else 0)  # groups, or none of them
        if len(kind.classes) > 1 and self.cost.exact_shares:
            best: dict[tuple[int, int], float] = {(0, kind.devices): 0.0}
            for number, groups in enumerate(_any(kind.counts, self.cost.widths(kind.devices), None)):
                if number >= ENUMERATED:
                    return hull(kind.paces, hidden)
                pace = sum(1 / self.types_of(kind, members)[0].block for members in groups)
                key = (len(groups), kind.devices - sum(map(len, groups)))
                best[key] = max(best.get(key, 0.0), pace)
            return hull(tuple((pace, *key) for key, pace in best.items()), hidden)
        return hull(kind.paces, hidden)

    def _groupings(self, kind: NodeKind) -> Iterator[Sequence[tuple[int, ...]]]:
        """Neighbours in the order of rates, the slowest idle; then any, while they are few."""
        order = [i for i, (_, _, count) in enumerate(kind.classes) for _ in range(count)]
        seen: set[tuple[tuple[int, ...], ...]] = set()
        widths = self.cost.widths(len(order))
        for used in range(len(order), 0, -1):
            for made in _neighbours(tuple(order[:used]), widths):
                key = tuple(sorted(made))
                if key not in seen:
                    seen.add(key)
                    yield made
                    if len(seen) >= ENUMERATED:
                        return
        if len(kind.classes) > 1:
            for made in _any(kind.counts, widths, None):
                key = tuple(sorted(made))
                if key not in seen:
                    seen.add(key)
                    yield made
                    if len(seen) >= ENUMERATED:
                        return

    def _made(self, kind: NodeKind, groups: Sequence[tuple[int, ...]]) -> Iterator[Division]:
        """The divisions of one grouping: with the fastest shares, and with others that need less memory."""
        options = [self.types_of(kind, members) for members in groups]
        for types in islice(product(*options), VARIANTS):
            made = sorted(zip(types, groups, strict=True), key=lambda entry: (entry[0].block, entry[1]))
            yield Division(types=tuple(t for t, _ in made), members=tuple(members for _, members in made))

    def types_of(self, kind: NodeKind, members: tuple[int, ...]) -> tuple[GroupType, ...]:
        """The group of these classes with each of the shares that is not slower and larger than another, the
        fastest first."""
        classes = tuple((kind.classes[i][0], kind.classes[i][1]) for i in members)
        link = kind.reach(members)
        if (classes, link) not in self._types:
            rates = tuple(rate for rate, _ in classes)
            memory = tuple(memory for _, memory in classes)
            found: list[GroupType] = []
            options = [(self._cost(rates, shares, link), shares) for shares in self.cost.shares(rates)]
            for cost, shares in sorted(options, key=lambda option: (option[0].block, max(option[1]))):
                largest = max(shares) / sum(shares)
                slower = found and cost.block > found[0].block * SLOWER
                if not slower and all(largest < max(t.shares) / sum(t.shares) for t in found):
                    found.append(GroupType(cost=cost, shares=shares, memory=memory))
            self._types[classes, link] = tuple(found)
        return self._types[classes, link]

    def _cost(self, rates: tuple[float, ...], shares: tuple[int, ...], link: Link) -> GroupCost:
        key = (rates, shares, link)
        if key not in self._costs:
            self._costs[key] = self.cost.group(rates, shares, link)
        return self._costs[key]


def divider(cost: CostModel) -> Divider:
    """A divider that remembers what it made for an equal cost, if costs can be compared quickly (hashed)."""
    try:
        made = _remembered(cast(Hashable, cost))
    except TypeError:
        return Divider(cost)
    if made.size > REMEMBERED:
        _remembered.cache_clear()
    return made


@lru_cache(maxsize=4)
def _remembered(cost: Hashable) -> Divider:
    return Divider(cast(CostModel, cost))


def _equal(kind: NodeKind, size: int) -> list[tuple[int, ...]]:
    """Groups of one size: inside islands first, then of what these leave."""
    order = [i for i, count in enumerate(kind.counts) for _ in range(count)]
    parts = [order]
    if kind.islands:
        parts = [[i for i in order if kind.islands[i] == island] for island in sorted(set(kind.islands))]
    runs = [tuple(part[at : at + size]) for part in parts for at in range(0, len(part) - size + 1, size)]
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


def _any(
    left: tuple[int, ...], widths: Sequence[int], last: tuple[int, ...] | None
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every multiset of groups by class, in descending order of (width, counts)."""
    yield ()
    options = product(*(range(count, -1, -1) for count in left))
    ranked = sorted((t for t in options if sum(t) in widths), key=lambda t: (sum(t), t), reverse=True)
    for taken in ranked:
        if last is not None and (sum(taken), taken) > (sum(last), last):
            continue
        rest = tuple(have - used for have, used in zip(left, taken, strict=True))
        members = tuple(i for i, count in enumerate(taken) for _ in range(count))
        for others in _any(rest, widths, taken):
            yield (members, *others)
