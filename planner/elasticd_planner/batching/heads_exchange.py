"""Context parallelism by heads: lanes that share a sequence compute all its tokens and a part of its heads.

Queries, keys and values have two layouts over tokens and heads: as they are computed (own tokens, own heads)
and as attention takes them here (all tokens, some heads). What a device lacks between the two it gets in one
exchange, and the outputs go back by the transposed one; so do gradients, the other way round
(DeepSpeed-Ulysses, Jacobs et al., 2023, for heads in any parts). What came is kept for the backward pass: it
takes the place of what was sent.

Heads are divided as tokens are, so that each device has as much attention and memory in either form.
`heads_form` says whether this form moves fewer bytes than the exchange of keys does (`context_exchange`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from elasticd_planner.batching.context_members import ContextMembers, ContextPart, context_relays
from elasticd_planner.batching.token_spans import Spans, joined, needed, overlaps, size

#: A byte between nodes weighs as so many inside of one: links of 300 and of 50 GB/s.
BETWEEN_NODES = 6
#: No device has more of the heads than of the tokens, but for one part in so many: less than what a lane's
#: measured slowdown must differ by to count (`lane_slowdown`).
EVEN = 32


class HeadsSequence(NamedTuple):
    """A sequence of which a device computes all tokens and some heads."""

    sequence: int  #: see `ContextExchange.sequences`
    length: int
    first: int  #: query heads [first, last) of the model
    last: int


class HeadsMessages(NamedTuple):
    """The exchange of a device with another one for these sequences. Outputs go back as queries came."""

    peer: str
    sends_queries: tuple[ContextPart, ...]
    sends_keys: tuple[ContextPart, ...]
    takes_queries: tuple[ContextPart, ...]
    takes_keys: tuple[ContextPart, ...]


#: By member the query heads [first, last) that it computes of a sequence.
HeadsDivision = Mapping[int, tuple[int, int]]


def heads_form(
    members: ContextMembers, held: Mapping[int, Spans], length: int, *, causal: bool, window: int | None
) -> HeadsDivision | None:
    """The division of a sequence's heads, if that moves fewer bytes than keys do.

    Counted are forward and backward passes of one attention: keys go forth, once more, and their gradients
    back; in the other form queries, keys and values go forth and outputs back, and the gradients of all once.
    Outputs are as wide as values, and queries as keys, so that the size of heads does not matter.

    Args:
        members: the devices of the stage.
        held: the tokens of each lane that has some.
        length: of the sequence.
        causal, window: of the attention.

    Returns:
        The heads of each member of these lanes; None: keys are to be exchanged. That is so for replicas, too,
        and where heads cannot be divided about as tokens are.
    """
    if members.replicas or len(held) < 2:
        return None
    found = divided_heads(members, held, length)
    if found is None:
        return None
    keys = 3 * _key_weight(members, held, length, causal=causal, window=window)
    return found if 2 * _heads_weight(members, held, found, length) < keys else None


def divided_heads(members: ContextMembers, held: Mapping[int, Spans], length: int) -> HeadsDivision | None:
    """The heads of each member of these lanes, in proportion to its tokens and heads; None: they do not divide
    so. Members that hold the same heads have them between them."""
    sharing = [at for at, member in enumerate(members.members) if member.lane in held]
    sharing.sort(key=lambda at: (*members.members[at].heads, at))
    tokens = {lane: size(spans) for lane, spans in held.items()}
    weights = []
    for at in sharing:
        first, last = members.members[at].heads
        weights.append(tokens[members.members[at].lane] * (last - first))
    total, heads = length * members.heads, members.heads
    if sum(weights) != total:
        return None
    ends = [(2 * heads * before + total) // (2 * total) for before in accumulate(weights, initial=0)]
    for weight, (first, last) in zip(weights, pairwise(ends), strict=True):
        if (last - first) * total * EVEN > heads * weight * (EVEN + 1):
            return None
    return dict(zip(sharing, pairwise(ends), strict=True))


def _key_weight(
    members: ContextMembers, held: Mapping[int, Spans], length: int, *, causal: bool, window: int | None
) -> int:
    """Of keys, one way: what comes to a node once for all its lanes, and what each device gets inside of it."""
    needs = {lane: needed(spans, length, causal=causal, window=window) for lane, spans in held.items()}
    by_node: dict[str, Spans] = defaultdict(list)
    lacking = 0
    for at, member in enumerate(members.members):
        if member.lane in held:
            mine, needs_here = held[member.lane], needs[member.lane]
            by_node[members.nodes[at]] += needs_here
            tokens = size(needs_here) - size(overlaps(mine, needs_here))
            lacking += tokens * (member.kv_heads[1] - member.kv_heads[0])
    of_node = {node: joined(spans) for node, spans in by_node.items()}
    far = sum(
        size(overlaps(held[relay.lane], of_node[members.nodes[relay.entry]])) * (relay.last - relay.first)
        for relay in context_relays(members, tuple(held))
    )
    return far * BETWEEN_NODES + max(0, lacking - far)


def _heads_weight(
    members: ContextMembers, held: Mapping[int, Spans], division: HeadsDivision, length: int
) -> int:
    """Of queries, keys and values together, one way, each device's from its own node as far as that has them.
    Keys and values count as two of four, and so do queries with the outputs that go back."""
    near_tokens: dict[str, int] = defaultdict(int)
    for lane, spans in held.items():
        for node in {members.nodes[at] for at in members.of_lane(lane)}:
            near_tokens[node] += size(spans)
    found = 0
    for taker, (first, last) in division.items():
        member = members.members[taker]
        own, near = size(held[member.lane]), near_tokens[members.nodes[taker]]
        kv_heads = kv_range(members, (first, last))
        for wanted, has in (((first, last), member.heads), (kv_heads, member.kv_heads)):
            count = wanted[1] - wanted[0]
            lacking = count - size(overlaps([wanted], [has]))
            found += count * (near - own + (length - near) * BETWEEN_NODES) + lacking * own
    return found


def kv_range(members: ContextMembers, heads: tuple[int, int]) -> tuple[int, int]:
    """The kv-heads [first, last) that some heads read."""
    first, last = heads
    return first // members.each, -(-last // members.each) if first < last else first // members.each


def heads_exchange(
    members: ContextMembers,
    device: str,
    sequences: Sequence[tuple[HeadsSequence, Mapping[int, Spans], HeadsDivision]],
) -> tuple[HeadsMessages, ...]:
    """The messages of a device for some sequences.

    Args:
        members: the devices of the stage.
        device: this one.
        sequences: of each what this device computes of it, the tokens of each lane, and the heads of all.
    """
    index = members.index[device]
    mine = members.members[index]
    parts: dict[int, tuple[list[ContextPart], ...]] = defaultdict(lambda: ([], [], [], []))
    for sequence, held, division in sequences:
        number = sequence.sequence
        for peer, heads in division.items():
            for source, span in _query_sources(members, mine.lane, heads):
                if source == index != peer:
                    parts[peer][0].extend(_parts(number, held[mine.lane], span))
            for source, span in _key_sources(members, mine.lane, peer, kv_range(members, heads)):
                if source == index != peer:
                    parts[peer][1].extend(_parts(number, held[mine.lane], span))
        heads = sequence.first, sequence.last
        for lane, spans in held.items():
            for source, span in _query_sources(members, lane, heads):
                if source != index:
                    parts[source][2].extend(_parts(number, spans, span))
            for source, span in _key_sources(members, lane, index, kv_range(members, heads)):
                if source != index:
                    parts[source][3].extend(_parts(number, spans, span))
    return tuple(
        HeadsMessages(members.members[peer].device, *map(tuple, parts[peer])) for peer in sorted(parts)
    )


def _parts(number: int, spans: Spans, heads: tuple[int, int]) -> Iterator[ContextPart]:
    return (ContextPart(number, start, stop, *heads) for start, stop in spans)


def _query_sources(
    members: ContextMembers, lane: int, heads: tuple[int, int]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Which members of a lane compute some query heads: each is computed by one."""
    for at in members.of_lane(lane):
        for span in overlaps([heads], [members.members[at].heads]):
            yield at, span


def _key_sources(
    members: ContextMembers, lane: int, taker: int, kv_heads: tuple[int, int]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Which members of a lane send a device some kv-heads, that several may have: itself first."""
    if kv_heads[0] == kv_heads[1]:
        return
    holders = members.of_lane(lane)
    for cell in members.cells([kv_heads], [members.members[at].kv_heads for at in holders]):
        if members.members[taker].lane == lane and overlaps([cell], [members.members[taker].kv_heads]):
            yield taker, cell
        else:
            yield members.holder(holders, cell, members.nodes[taker], taker), cell
