"""Context parallelism: which keys and values lanes send each other for the sequences that they share.

A sequence may be cut over any set of lanes, in any shares. Its keys and values have two layouts over tokens and
kv-heads: as they are computed (each member of a lane has the tokens of its piece and its own kv-heads), and as
they are needed (queries of tokens [a, b) under a causal mask need the tokens [0, b) of their kv-heads; of a
window the last of those). What a device lacks between the two is what it is sent, whatever the widths of the
lanes. Gradients of keys go back the same way: a device that was sent keys has a term of their gradient.

Keys that several devices of a node need of another node go there once, to one of these devices, and from it to
the others. So there is a third layout between the two: each node has all that its devices need, each token and
kv-head once. Rounds between nodes come first. Gradients go back the same way: the device that passed keys on
adds up their terms, and one sum goes over the link between the nodes.

Where an attention is not cut, the members of a lane are replicas that all compute all of it, and each must have
all of the gradient: once from each other lane, by the member that sends it that lane's keys. Replicas have the
same terms, so that it does not matter by whom the keys were sent. Nothing is passed on between them.

Where it moves fewer bytes, lanes compute all tokens of a sequence and a part of its heads instead
(`heads_exchange`).

Messages go in rounds. Of n devices, i and j exchange in round (i + j) mod n: so each device has one partner in
a round, and the two send to each other. Rounds are in one order on all devices; those that no device can have
a message in are left out, and rounds of few bytes are launched as one. All of it is a pure function of the row
and of who holds which heads; a device derives its own messages alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from elasticd_planner.batching.context_members import (
    ContextMembers,
    ContextPart,
    ContextRelay,
    context_relays,
)
from elasticd_planner.batching.heads_exchange import (
    HeadsDivision,
    HeadsMessages,
    HeadsSequence,
    heads_exchange,
    heads_form,
)
from elasticd_planner.batching.token_spans import Spans, joined, needed, overlaps, size
from elasticd_planner.spec.batch import MicroBatch, SequencePiece
from elasticd_planner.value import refuse


class ContextRound(NamedTuple):
    """The exchange of a device with one partner. Rounds of one number are launched together."""

    number: int  #: among the rounds of all devices
    peer: str
    sends: tuple[ContextPart, ...]  #: keys
    takes: tuple[ContextPart, ...]
    gives: tuple[ContextPart, ...]  #: terms of the gradients of these keys
    gets: tuple[ContextPart, ...]
    last: bool  #: what is given may be of keys that a later round has, or passes on


class ContextExchange(NamedTuple):
    """The messages of one device in one row of its lane, for the attention of a layer."""

    #: By piece of the device's lane: the sequence that it is a part of, numbered within the row, with the same
    #: number on all devices.
    sequences: tuple[int, ...]
    rounds: tuple[ContextRound, ...]  #: with messages of this device, in their order
    replicas: bool  #: members of a lane all compute all of the attention
    heads: tuple[HeadsSequence, ...] = ()  #: sequences of which this device computes some heads
    heads_messages: tuple[HeadsMessages, ...] = ()  #: for these, with each other device


class _Shared(NamedTuple):
    """A sequence that several lanes share: its tokens by lane, those whose keys a lane needs, what goes between
    nodes (none: each device gets its keys from those that have them), and how its heads are divided."""

    number: int
    length: int
    lanes: tuple[int, ...]
    held: Mapping[int, Spans]
    needs: Mapping[int, Spans]
    relays: tuple[ContextRelay, ...]
    division: HeadsDivision | None

    @property
    def most(self) -> int:
        """The most tokens of a lane."""
        return max(map(size, self.held.values()))


def context_exchange(
    lanes: Sequence[MicroBatch],
    members: ContextMembers,
    device: str,
    *,
    causal: bool = True,
    window: int | None = None,
    together: int = 0,
) -> ContextExchange:
    """The exchange of a device in a row.

    Args:
        lanes: the row: the pieces of each lane.
        members: the devices of the stage.
        device: this one.
        causal: queries need the keys of earlier tokens alone, and of their own.
        window: they need those of so many tokens, their own among them; None: of all.
        together: rounds are launched together as long as each device sends at most so much in them [tokens x
            kv-heads].

    Raises:
        Invalid: pieces of a sequence leave tokens out, or overlap.
    """
    index = members.index[device]
    mine, chains = members.members[index].lane, _chains(lanes)
    shared = list(_shared(chains, members, causal=causal, window=window))
    sequences = [0] * len(lanes[mine])
    for number, chain in enumerate(chains):
        for lane, at, _ in chain:
            if lane == mine:
                sequences[at] = number
    by_keys = [each for each in shared if each.division is None]
    numbers = _numbered(by_keys, members, together)
    messages: _Messages = defaultdict(lambda: ([], [], [], []))
    by_heads = []
    for each in shared:
        if mine not in each.held:
            continue
        if each.division is not None:
            first, last = each.division[index]
            heads = HeadsSequence(each.number, each.length, first, last)
            by_heads.append((heads, each.held, each.division))
            continue
        _add_direct(messages, each, members, index)
        _add_passed_on(messages, each, members, index)
    rounds = []
    for (far, peer), parts in messages.items():
        if any(parts):
            number = numbers[not far, (index + peer) % len(members.members)]
            sends, takes, gives, gets = map(tuple, parts)
            device_of_peer, last = members.members[peer].device, far or members.replicas
            rounds.append(ContextRound(number, device_of_peer, sends, takes, gives, gets, last))
    return ContextExchange(
        tuple(sequences),
        tuple(sorted(rounds)),
        members.replicas,
        tuple(heads for heads, _, _ in by_heads),
        heads_exchange(members, device, by_heads),
    )


#: What is sent, taken, given and got, by whether it is passed on between nodes, and by partner.
_Messages = dict[tuple[bool, int], tuple[list[ContextPart], ...]]


def _add_direct(messages: _Messages, shared: _Shared, members: ContextMembers, index: int) -> None:
    """Keys that go straight from the device that computes them to one that needs them."""
    mine, node = members.members[index].lane, members.nodes[index]
    for peer, member in enumerate(members.members):
        if member.lane == mine or member.lane not in shared.held:
            continue
        if shared.relays and members.nodes[peer] != node:
            continue
        here = overlaps(shared.held[mine], shared.needs[member.lane])
        there = overlaps(shared.held[member.lane], shared.needs[mine])
        sends = _of(shared.number, here, members.served(index, peer))
        takes = _of(shared.number, there, members.served(peer, index))
        if members.replicas:  # all of each lane's terms come once from one of its members
            gives = _of(shared.number, there, members.served(index, peer))
            gets = _of(shared.number, here, members.served(peer, index))
        else:
            gives, gets = takes, sends
        for into, parts in zip(messages[False, peer], (sends, takes, gives, gets), strict=True):
            into.extend(parts)


def _of(number: int, tokens: Spans, heads: Spans) -> list[ContextPart]:
    return [ContextPart(number, *span, *part) for part in heads for span in tokens]


def _add_passed_on(messages: _Messages, shared: _Shared, members: ContextMembers, index: int) -> None:
    """Keys that come from another node once, and are passed on inside of this one."""
    for relay in shared.relays:
        if index != relay.source and index not in relay.takers:
            continue
        held, heads = shared.held[relay.lane], [(relay.first, relay.last)]

        def wanted(taker: int, held: Spans = held) -> Spans:
            return overlaps(held, shared.needs[members.members[taker].lane])

        every = joined([span for taker in relay.takers for span in wanted(taker)])
        between = _of(shared.number, every, heads)
        for into in (0, 3) if index == relay.source else (1, 2) if index == relay.entry else ():
            messages[True, relay.entry if index == relay.source else relay.source][into].extend(between)
        for taker in relay.takers if index == relay.entry else (index,) * (index in relay.takers):
            if taker != relay.entry:
                peer = taker if index == relay.entry else relay.entry
                for into in (0, 3) if index == relay.entry else (1, 2):
                    messages[False, peer][into].extend(_of(shared.number, wanted(taker), heads))


def _shared(
    chains: Sequence[_Chain], members: ContextMembers, *, causal: bool, window: int | None
) -> Iterator[_Shared]:
    for number, chain in enumerate(chains):
        lanes = tuple(sorted({lane for lane, _, _ in chain}))
        if len(lanes) == 1:
            continue
        length = chain[0][2].length
        held = {lane: joined(_spans(chain, lane)) for lane in lanes}
        needs = {lane: needed(spans, length, causal=causal, window=window) for lane, spans in held.items()}
        division = heads_form(members, held, length, causal=causal, window=window)
        relays: tuple[ContextRelay, ...] = ()
        if not members.replicas and division is None:
            relays = context_relays(members, lanes)
            if not _fewer_bytes(relays, members, held, needs):
                relays = ()
        yield _Shared(number, length, lanes, held, needs, relays, division)


def _fewer_bytes(
    relays: Sequence[ContextRelay],
    members: ContextMembers,
    held: Mapping[int, Spans],
    needs: Mapping[int, Spans],
) -> bool:
    """Returns True if some keys would otherwise go to a node more than once."""
    for relay in relays:
        came: Spans = []
        for taker in relay.takers:
            wanted = overlaps(held[relay.lane], needs[members.members[taker].lane])
            if overlaps(came, wanted):
                return True
            came += wanted
    return False


def _numbered(
    shared: Sequence[_Shared], members: ContextMembers, together: int
) -> Mapping[tuple[bool, int], int]:
    """The numbers of rounds in which any device may have messages, by whether they are inside of nodes and by
    the sum of the partners' places; the same on all devices."""
    forms = tuple(sorted({(each.lanes, bool(each.relays)) for each in shared}))
    kv_heads = max(member.kv_heads[1] - member.kv_heads[0] for member in members.members)
    most = sum(each.most for each in shared) * kv_heads  # of a device to another one
    return _numbers(members, forms, max(1, together // max(1, most)))


@lru_cache(maxsize=256)
def _numbers(
    members: ContextMembers, forms: tuple[tuple[tuple[int, ...], bool], ...], together: int
) -> Mapping[tuple[bool, int], int]:
    rounds = sorted({each for lanes, passes_on in forms for each in _rounds(members, lanes, passes_on)})
    far = sum(not inside for inside, _ in rounds)
    first = -(-far // together)  # of those inside of nodes
    return {
        each: at // together if at < far else first + (at - far) // together for at, each in enumerate(rounds)
    }


@lru_cache(maxsize=256)
def _rounds(members: ContextMembers, lanes: tuple[int, ...], passes_on: bool) -> frozenset[tuple[bool, int]]:
    """Those of lanes that share a sequence."""
    count, found = len(members.members), set[tuple[bool, int]]()
    sharing = [at for at, member in enumerate(members.members) if member.lane in lanes]
    for i, j in combinations(sharing, 2):
        one, other = members.members[i], members.members[j]
        direct = not passes_on or members.nodes[i] == members.nodes[j]
        if direct and one.lane != other.lane and overlaps([one.kv_heads], [other.kv_heads]):
            found.add((True, (i + j) % count))
    for relay in context_relays(members, lanes) if passes_on else ():
        found.add((False, (relay.source + relay.entry) % count))
        found |= {(True, (relay.entry + taker) % count) for taker in relay.takers if taker != relay.entry}
    return frozenset(found)


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


def _spans(chain: _Chain, lane: int) -> Spans:
    """The tokens of a sequence that a lane has."""
    return [span for at, _, piece in chain if at == lane for span in piece.spans]
