"""Context parallelism: which keys and values lanes send each other for the sequences that they share.

A sequence may be cut over any set of lanes, in any shares. Its keys and values have two layouts over tokens and
kv-heads: as they are computed (each member of a lane has the tokens of its piece and its own kv-heads), and as
they are needed (queries of tokens [a, b) under a causal mask need the tokens [0, b) of their kv-heads; of a
window the last of those). What a device lacks between the two is what it is sent, whatever the widths of the
lanes. Gradients of keys go back the same way: a device that was sent keys has a term of their gradient.

Where an attention is not cut, the members of a lane are replicas that all compute all of it, and each must have
all of the gradient: once from each other lane, by the member that sends it that lane's keys. Replicas have the
same terms, so that it does not matter by whom the keys were sent.

Messages go in rounds. Of n devices, i and j exchange in round (i + j) mod n: so each device has one partner in
a round, and the two send to each other. Rounds are in one order on all devices; those that no device can have a
message in are left out. All of it is a pure function of the row and of who holds which heads; a device derives
its own messages alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple

from elasticd_planner.spec.batch import MicroBatch, SequencePiece
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.model import ModelSpec, unit_range
from elasticd_planner.spec.plan import Stage
from elasticd_planner.value import refuse

_Spans = list[tuple[int, int]]  # ranges [start, stop)
_Sets = tuple[tuple[int, ...], ...]  # of lanes


class ContextMember(NamedTuple):
    """A device of a stage and the heads that it computes, as ranges [start, stop) of those of the model."""

    device: str
    lane: int
    heads: tuple[int, int]
    kv_heads: tuple[int, int]


class ContextPart(NamedTuple):
    """Keys and values of tokens [start, stop) of a sequence, for the kv-heads [first, last)."""

    sequence: int  #: see `ContextExchange.sequences`
    start: int
    stop: int
    first: int
    last: int

    @property
    def size(self) -> int:
        """Tokens times kv-heads."""
        return (self.stop - self.start) * (self.last - self.first)


class ContextRound(NamedTuple):
    """What a device exchanges with its partner of a round."""

    number: int  #: among the rounds of all devices
    peer: str
    sends: tuple[ContextPart, ...]  #: keys
    takes: tuple[ContextPart, ...]
    gives: tuple[ContextPart, ...]  #: terms of the gradients of these keys
    gets: tuple[ContextPart, ...]


class ContextExchange(NamedTuple):
    """What one device sends and receives in one row of its lane, for the attention of a layer."""

    #: By piece of the device's lane: the sequence that it is a part of, numbered within the row, with the same
    #: number on all devices.
    sequences: tuple[int, ...]
    rounds: tuple[ContextRound, ...]  #: with messages of this device, in their order
    replicas: bool  #: what is given in a round may be of keys that come in a later one


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
        self._sources: dict[tuple[int, int], Mapping[int, _Spans]] = {}
        self._numbers: dict[_Sets, dict[int, int]] = {}

    def served(self, source: int, taker: int) -> _Spans:
        """The kv-heads whose keys a device gets from a certain one of another lane."""
        key = self.members[source].lane, taker
        if key not in self._sources:
            self._sources[key] = self._sources_of(*key)
        return self._sources[key].get(source, [])

    def _sources_of(self, lane: int, taker: int) -> Mapping[int, _Spans]:
        """From which devices of a lane another device gets its kv-heads: of those that hold one, from one of
        its own node, if there is any; devices of a lane take turns."""
        members = self.members
        (start, stop), node = members[taker].kv_heads, node_of(members[taker].device)
        holders = [at for at, member in enumerate(members) if member.lane == lane]
        edges = {start, stop, *(edge for at in holders for edge in members[at].kv_heads)}
        turn = sum(member.lane == members[taker].lane for member in members[:taker])
        found: dict[int, _Spans] = {}
        for first, last in pairwise(sorted(edge for edge in edges if start <= edge <= stop)):
            span = first, last
            holding = [at for at in holders if _overlaps([span], [members[at].kv_heads])]
            near = [at for at in holding if node_of(members[at].device) == node] or holding
            chosen = near[turn % len(near)]
            found[chosen] = _joined([*found.get(chosen, []), span])
        return found

    def numbers(self, sets: _Sets) -> Mapping[int, int]:
        """The rounds in which devices of lanes that share a sequence may have messages, numbered from 0.

        Args:
            sets: of lanes that share a sequence of the row.
        """
        if sets not in self._numbers:
            if len(self._numbers) >= _KEPT:
                self._numbers.clear()
            pairs = {pair for lanes in sets for pair in combinations(lanes, 2)}
            rounds = {at for pair in pairs for at in self._rounds.get(pair, ())}
            self._numbers[sets] = {at: number for number, at in enumerate(sorted(rounds))}
        return self._numbers[sets]

    @cached_property
    def _rounds(self) -> Mapping[tuple[int, int], set[int]]:
        """Those of two lanes: of all devices that have heads in common."""
        found: dict[tuple[int, int], set[int]] = defaultdict(set)
        for (i, one), (j, other) in combinations(enumerate(self.members), 2):
            if one.lane != other.lane and _overlaps([one.kv_heads], [other.kv_heads]):
                found[one.lane, other.lane].add((i + j) % len(self.members))
        return found


#: Sets of lanes of which the rounds are remembered.
_KEPT = 256


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


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _kinds(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """The kinds of units that may be of heads and of their kv-heads, those that are said to be first."""
    yield from ((units.follows, units.kind) for units in spec.units if units.follows is not None)
    alone = [units.kind for units in spec.units if units.follows is None]
    yield from ((kind, kind) for kind in sorted(alone, key=lambda kind: "head" not in kind))


def _cut_members(spec: ModelSpec, stage: Stage, kind: str, kv_kind: str) -> list[ContextMember]:
    found = []
    for number, lane in enumerate(stage.by_lane):
        for position, device in enumerate(lane.devices):
            ranges = (unit_range(spec, each, lane.shares, position) for each in (kind, kv_kind))
            heads, kv_heads = ((units.start, units.stop) for units in ranges)
            found.append(ContextMember(device, number, heads, kv_heads))
    return found


def context_exchange(
    lanes: Sequence[MicroBatch],
    members: ContextMembers,
    device: str,
    *,
    causal: bool = True,
    window: int | None = None,
) -> ContextExchange:
    """What a device sends and receives in a row.

    Args:
        lanes: the row: the pieces of each lane.
        members: the devices of the stage.
        device: this one.
        causal: queries need the keys of earlier tokens alone, and of their own.
        window: they need those of so many tokens, their own among them; None: of all.

    Raises:
        Invalid: pieces of a sequence leave tokens out, or overlap.
    """
    listed, index = members.members, members.index[device]
    mine, chains = listed[index].lane, _chains(lanes)
    shared = [tuple(sorted({lane for lane, _, _ in chain})) for chain in chains]
    numbers = members.numbers(tuple(sorted({each for each in shared if len(each) > 1})))
    sends, takes, gives, gets = (defaultdict[int, list[ContextPart]](list) for _ in range(4))
    sequences = [0] * len(lanes[mine])
    for number, chain in enumerate(chains):
        for lane, at, _ in chain:
            if lane == mine:
                sequences[at] = number
        if mine not in shared[number] or len(shared[number]) == 1:
            continue
        length = chain[0][2].length
        held = {lane: _joined(_spans(chain, lane)) for lane in shared[number]}
        needed = {lane: _needed(spans, length, causal=causal, window=window) for lane, spans in held.items()}
        for peer, member in enumerate(listed):
            if member.lane == mine or member.lane not in held:
                continue
            here = _overlaps(held[mine], needed[member.lane])
            there = _overlaps(held[member.lane], needed[mine])
            for first, last in members.served(index, peer):
                sends[peer] += [ContextPart(number, *span, first, last) for span in here]
                gives[peer] += [ContextPart(number, *span, first, last) for span in there]
            for first, last in members.served(peer, index):
                takes[peer] += [ContextPart(number, *span, first, last) for span in there]
                gets[peer] += [ContextPart(number, *span, first, last) for span in here]
    if not members.replicas:
        gives, gets = takes, sends
    rounds = [
        ContextRound(
            numbers[(index + peer) % len(listed)],
            listed[peer].device,
            *(tuple(parts.get(peer, ())) for parts in (sends, takes, gives, gets)),
        )
        for peer in {**sends, **takes, **gives, **gets}
        if sends.get(peer) or takes.get(peer) or gives.get(peer) or gets.get(peer)
    ]
    return ContextExchange(tuple(sequences), tuple(sorted(rounds)), members.replicas)


#: The pieces of a sequence by their pairs: (lane, index in the lane's micro-batch, piece).
_Chain = list[tuple[int, int, SequencePiece]]


def _chains(lanes: Sequence[MicroBatch]) -> list[_Chain]:
    """The sequences of a row. A sample that is in it twice is two sequences."""
    found: list[_Chain] = []
    begun: dict[tuple[int, int, int], list[_Chain]] = {}  # by sample, length and the pair that comes next
    listed = [(lane, at, piece) for lane, pieces in enumerate(lanes) for at, piece in enumerate(pieces)]
    for lane, at, piece in sorted(listed, key=lambda each: each[2].start):
        key = piece.sample, piece.length
        if piece.start == 0:
            chain: _Chain = []
            found.append(chain)
        else:
            waiting = begun.get((*key, piece.start))
            if not waiting:
                refuse(f"sample {piece.sample}: no lane has its pairs before {piece.start}, or two have some")
            chain = waiting.pop(0)
        chain.append((lane, at, piece))
        begun.setdefault((*key, piece.stop), []).append(chain)
    for chain in found:
        last = chain[-1][2]
        if 2 * last.stop < last.length:
            refuse(f"sample {last.sample}: no lane of the row has its pairs from {last.stop}, or two have some")
    return found


def _spans(chain: _Chain, lane: int) -> _Spans:
    """The tokens of a sequence that a lane has."""
    return [span for at, _, piece in chain if at == lane for span in piece.spans]


def _joined(spans: _Spans) -> _Spans:
    """The same tokens in as few ranges as they make, in order."""
    found: _Spans = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _needed(spans: _Spans, length: int, *, causal: bool, window: int | None) -> _Spans:
    """The tokens whose keys the queries of some ranges attend to."""
    if not causal:
        return [(0, length)]
    return _joined([(0 if window is None else max(0, start - window + 1), stop) for start, stop in spans])


def _overlaps(some: _Spans, others: _Spans) -> _Spans:
    both = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return [(start, stop) for start, stop in both if start < stop]
