"""Exchange of keys: what a device lacks between two layouts, whoever it is, and never more than that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, count

import pytest
from elasticd_planner.batching import context_exchange as context_exchanges
from elasticd_planner.batching.context_exchange import ContextExchange, context_exchange
from elasticd_planner.batching.context_members import (
    ContextMember,
    ContextMembers,
    ContextPart,
    context_members,
)
from elasticd_planner.batching.heads_exchange import BETWEEN_NODES, divided_heads
from elasticd_planner.spec.batch import MicroBatch, SequencePiece
from elasticd_planner.spec.box import Box, Holding, TensorLayout, lacking
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.model import ModelSpec, Parameter, Units, apportion
from elasticd_planner.spec.plan import Stage
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

SPEC = ModelSpec(
    name="any",
    embed=(Parameter(name="e", shape=(4,), dtype="float64"),),
    kinds=((Parameter(name="b", shape=(4,), dtype="float64"),),),
    layers=(0, 0),
    head=(Parameter(name="h", shape=(4,), dtype="float64"),),
    units=(
        Units(kind="columns", count=24),
        Units(kind="heads", count=8),
        Units(kind="kv_heads", count=4, follows="heads"),
    ),
)


def cut(sample: int, length: int, shares: dict[int, int]) -> dict[int, SequencePiece]:
    """The piece of each lane of a sequence that is cut by these shares."""
    pairs = (length + 1) // 2
    given = apportion(pairs, tuple(shares.values())) if len(shares) > 1 else (pairs,)
    ends = list(accumulate(given, initial=0))
    return {
        lane: SequencePiece(sample, length, a, b) for lane, a, b in zip(shares, ends, ends[1:], strict=False)
    }


def row_of(lanes: int, sequences: Sequence[tuple[int, dict[int, int]]]) -> tuple[MicroBatch, ...]:
    """A row of sequences, each with its length and its shares by lane."""
    found: list[list[SequencePiece]] = [[] for _ in range(lanes)]
    for sample, (length, shares) in enumerate(sequences):
        for lane, piece in cut(sample, length, shares).items():
            found[lane].append(piece)
    return tuple(map(tuple, found))


def stage_of(*widths: Sequence[int], nodes: str = "abcdefgh") -> Stage:
    """A stage whose lanes have members with these shares, each lane on the node of this name."""
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    devices = [
        f"{nodes[lane]}/{next(numbers[nodes[lane]])}" for lane, shares in enumerate(widths) for _ in shares
    ]
    return Stage(
        start=0,
        stop=2,
        devices=tuple(devices),
        shares=tuple(share for shares in widths for share in shares),
        lanes=tuple(map(len, widths)),
    )


def members_of(stage: Stage) -> ContextMembers:
    """Of a layer whose heads are cut."""
    device, lane = stage.devices[0], stage.by_lane[0]
    given = apportion(8, lane.shares)
    kv_heads = given[0] if given[0] % 2 else given[0] // 2
    return context_members(SPEC, stage, device, given[0], kv_heads)


def exchanges(
    row: tuple[MicroBatch, ...],
    members: ContextMembers,
    window: int | None = None,
    *,
    causal: bool = True,
) -> dict[str, ContextExchange]:
    """Those of all devices."""
    return {
        member.device: context_exchange(row, members, member.device, causal=causal, window=window)
        for member in members.members
    }


def layouts(
    row: tuple[MicroBatch, ...],
    members: ContextMembers,
    sample: int,
    needs: Needs,
    *,
    queries: bool = False,
) -> tuple[TensorLayout, TensorLayout]:
    """Keys, or queries, of a sequence as they are computed and as they are needed, token by token."""
    held, needed, length = [], [], 0
    for member in members.members:
        for piece in row[member.lane]:
            if piece.sample != sample:
                continue
            length, (first, last) = piece.length, member.heads if queries else member.kv_heads
            for start, stop in piece.spans:
                held.append(Holding(device=member.device, box=Box(start=(start, first), stop=(stop, last))))
                for token in range(start, stop):
                    needed += [Holding(device=member.device, box=box) for box in needs(member, token, length)]
    heads = max((member.heads if queries else member.kv_heads)[1] for member in members.members)
    return (
        TensorLayout(name="x", shape=(length, heads), dtype="float64", holdings=tuple(held)),
        TensorLayout(name="x", shape=(length, heads), dtype="float64", holdings=tuple(needed)),
    )


#: The boxes of tokens and heads that a member needs for one of its tokens.
Needs = Callable[[ContextMember, int, int], Sequence[Box]]


def cells(parts: Sequence[ContextPart]) -> list[tuple[int, int, int]]:
    """Each token and kv-head of some parts, as often as it is there."""
    return [
        (part.sequence, token, head)
        for part in parts
        for token in range(part.start, part.stop)
        for head in range(part.first, part.last)
    ]


def lacks(sequence: int, old: TensorLayout, new: TensorLayout) -> dict[str, list[tuple[int, int, int]]]:
    """What each device lacks, by single cells."""
    return {
        device: cells([ContextPart(sequence, b.start[0], b.stop[0], b.start[1], b.stop[1]) for b in boxes])
        for device, boxes in lacking(old, new).items()
    }


def check(
    row: tuple[MicroBatch, ...],
    members: ContextMembers,
    window: int | None = None,
    *,
    causal: bool = True,
) -> None:
    """Against `lacking`, by single cells."""
    found = exchanges(row, members, window, causal=causal)
    number = {}
    for member in members.members:
        for piece, sequence in zip(row[member.lane], found[member.device].sequences, strict=True):
            assert number.setdefault(piece.sample, sequence) == sequence, "one number on all devices"
    by_heads = {each.sequence: each.length for exchange in found.values() for each in exchange.heads}

    def attended(member: ContextMember, token: int, length: int) -> list[Box]:
        begin = 0 if window is None else max(0, token - window + 1)
        end = token + 1 if causal else length
        return [Box(start=(begin, member.kv_heads[0]), stop=(end, member.kv_heads[1]))]

    keys: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    held: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    for sample, sequence in number.items():
        if sequence in by_heads:
            check_heads(row, members, sample, sequence, found)
            continue
        old, new = layouts(row, members, sample, attended)
        for device, more in lacks(sequence, old, new).items():
            keys[device] += more
        for holding in old.holdings:
            box = holding.box
            part = ContextPart(sequence, box.start[0], box.stop[0], box.start[1], box.stop[1])
            held[holding.device] |= set(cells([part]))
    check_rounds(members, found, keys, held)


def check_rounds(
    members: ContextMembers,
    found: dict[str, ContextExchange],
    keys: dict[str, list[tuple[int, int, int]]],
    held: dict[str, set[tuple[int, int, int]]],
) -> None:
    """Each device gets all keys that it lacks, each once, and no others than those that it passes on; and
    whatever a node gets of another, it gets once."""
    sent, taken, partners = {}, {}, set()
    for device, exchange in found.items():
        assert sorted(each.number for each in exchange.rounds) == [each.number for each in exchange.rounds]
        has, came, passed_on = set(held[device]), [], set()
        for each in exchange.rounds:
            assert each.sends or each.takes or each.gives or each.gets
            assert (device, each.number) not in partners, "one partner in a round"
            partners.add((device, each.number))
            sent[device, each.peer, each.number] = each.sends
            taken[each.peer, device, each.number] = each.takes
            assert set(cells(each.sends)) <= has, "it sends what it has, or what came before"
            passed_on |= set(cells(each.sends)) - held[device]
            came += cells(each.takes)
            has |= set(came)
            if not members.replicas:
                assert (each.gives, each.gets) == (each.takes, each.sends)
        assert len(came) == len(set(came)), "each cell once"
        assert set(came) - passed_on <= set(keys[device]) <= set(came)
        if passed_on:
            assert all(each.last for each in exchange.rounds if passed_on & set(cells(each.takes)))
    for key in {**sent, **taken}:
        assert sent.get(key, ()) == taken.get(key, ()), "both ends know the same messages in the same order"
    if not members.replicas:
        for node in {node_of(device) for device in found}:
            every = [
                cell
                for (source, taker, _), parts in sent.items()
                if node_of(taker) == node != node_of(source)
                for cell in cells(parts)
            ]
            assert len(every) == len(set(every)), "a node gets each cell once"


def check_heads(
    row: tuple[MicroBatch, ...],
    members: ContextMembers,
    sample: int,
    sequence: int,
    found: dict[str, ContextExchange],
) -> None:
    """Each device gets the queries and keys that it lacks of its heads, each once, of one that has them; all
    heads of all tokens are computed once."""
    mine = {d: next((h for h in x.heads if h.sequence == sequence), None) for d, x in found.items()}
    spans = sorted(
        (each.first, each.last) for each in mine.values() if each is not None and each.first < each.last
    )
    assert [0, *(last for _, last in spans)] == [*(first for first, _ in spans), members.heads]

    def computed(member: ContextMember, token: int, length: int, each: int) -> list[Box]:
        heads = mine[member.device]
        assert heads is not None
        assert heads.length == length
        return [Box(start=(0, heads.first // each), stop=(length, -(-heads.last // each)))]

    for queries in (True, False):
        each = 1 if queries else members.each
        old, new = layouts(row, members, sample, partial(computed, each=each), queries=queries)
        wanted = lacks(sequence, old, new)
        for device, exchange in found.items():
            messages = {each.peer: each for each in exchange.heads_messages}
            takes = {
                peer: [
                    part
                    for part in (at.takes_queries if queries else at.takes_keys)
                    if part.sequence == sequence
                ]
                for peer, at in messages.items()
            }
            came = [cell for parts in takes.values() for cell in cells(parts)]
            assert sorted(came) == sorted(wanted.get(device, []))
            for peer, parts in takes.items():
                its = next(at for at in found[peer].heads_messages if at.peer == device)
                sends = its.sends_queries if queries else its.sends_keys
                assert parts == [part for part in sends if part.sequence == sequence]
                box = [holding.box for holding in old.holdings if holding.device == peer]
                for _, token, head in cells(parts):
                    assert any(b.contains(Box(start=(token, head), stop=(token + 1, head + 1))) for b in box)


THREE = [(101, {0: 5, 1: 3, 2: 2}), (40, {1: 1, 2: 1}), (17, {0: 1}), (24, {2: 1}), (7, {2: 1, 0: 3})]


@pytest.mark.parametrize("window", [None, 1, 9, 30, 200])
def test_lanes_of_unlike_width_get_what_they_lack(window: int | None) -> None:
    for widths in ([(1,), (1,), (1,)], [(1,), (3, 1), (5, 3, 2)], [(1, 1), (1,), (1, 1, 1, 1)]):
        check(row_of(3, THREE), members_of(stage_of(*widths)), window)


def test_without_a_causal_mask_all_keys_are_needed() -> None:
    check(row_of(3, THREE), members_of(stage_of((1,), (3, 1), (1,))), causal=False)


@pytest.mark.parametrize("window", [None, 9])
def test_each_replica_gets_all_of_its_gradient_once(window: int | None) -> None:
    """Of members that all compute all of an attention: from each other lane the terms of all its keys."""
    devices = ("a/0", "a/1", "b/0", "b/1", "b/2", "c/0")
    stage = Stage(start=0, stop=2, devices=devices, shares=(1,) * 6, lanes=(1, 2, 3))
    row = row_of(3, THREE)
    members = context_members(SPEC, stage, stage.devices[0], 3, 3)
    assert members.replicas
    found = exchanges(row, members, window)
    check(row, members, window)
    for device, exchange in found.items():
        mine = members.members[members.index[device]].lane
        for lane in {0, 1, 2} - {mine}:
            others = {member.device for member in members.members if member.lane == lane}
            sent = next(found[other] for other in others)
            right = [
                cell
                for each in sent.rounds
                for cell in cells(each.takes)
                if _has(row, members, mine, cell, found)
            ]
            got = [cell for each in exchange.rounds if each.peer in others for cell in cells(each.gets)]
            assert sorted(got) == sorted(right)
        for each in exchange.rounds:
            (its,) = (other for other in found[each.peer].rounds if other.peer == device)
            assert (each.gives, each.gets, each.number) == (its.gets, its.gives, its.number)
            assert set(cells(each.gives)) <= {cell for one in exchange.rounds for cell in cells(one.takes)}


def _has(
    row: tuple[MicroBatch, ...],
    members: ContextMembers,
    lane: int,
    cell: tuple[int, int, int],
    found: dict[str, ContextExchange],
) -> bool:
    """Whether a lane has a token of a sequence."""
    device = next(member.device for member in members.members if member.lane == lane)
    return any(
        number == cell[0] and any(start <= cell[1] < stop for start, stop in piece.spans)
        for number, piece in zip(found[device].sequences, row[lane], strict=True)
    )


SHARES = st.dictionaries(st.integers(0, 3), st.integers(1, 6), min_size=1, max_size=4)
WIDTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=4, max_size=4)


@given(
    st.lists(st.tuples(st.integers(8, 60), SHARES), min_size=1, max_size=5),
    WIDTHS,
    st.none() | st.integers(1, 40),
    st.sampled_from(["abcd", "aabb", "aaaa", "across"]),
)
@settings(max_examples=60, deadline=None)
def test_any_row_of_any_lanes(
    sequences: list[tuple[int, dict[int, int]]],
    widths: list[list[int]],
    window: int | None,
    nodes: str,
) -> None:
    made = [
        f"{'ab'[at % 2] if nodes == 'across' else nodes[lane]}/{lane}{at}"
        for lane, shares in enumerate(widths)
        for at in range(len(shares))
    ]
    stage = Stage(
        start=0,
        stop=2,
        devices=tuple(made),
        shares=tuple(share for shares in widths for share in shares),
        lanes=tuple(map(len, widths)),
    )
    check(row_of(4, sequences), members_of(stage), window)


@pytest.mark.parametrize("lanes", [2, 3, 5, 8])
def test_equal_shares_need_three_quarters_of_what_a_ring_passes_around(lanes: int) -> None:
    length = 2 * lanes * 64
    row = row_of(lanes, [(length, dict.fromkeys(range(lanes), 1))])
    found = exchanges(row, members_of(stage_of(*[(1,)] * lanes)))
    sizes = sum(part.size for exchange in found.values() for each in exchange.rounds for part in each.takes)
    around = (lanes - 1) * length * 4
    assert sizes <= 0.76 * around


def lanes_of(nodes: str, heads: int, kv_heads: int) -> ContextMembers:
    """A lane of one device for each letter, which is its node."""
    devices = stage_of(*[(1,)] * len(nodes), nodes=nodes).devices
    return ContextMembers(
        [ContextMember(device, lane, (0, heads), (0, kv_heads)) for lane, device in enumerate(devices)],
        heads // kv_heads,
    )


def moved(row: tuple[MicroBatch, ...], members: ContextMembers, *, causal: bool = True) -> tuple[int, int]:
    """Tokens times heads that go between nodes, and inside of them, in a forward and a backward pass."""
    found = [0, 0]
    for device, exchange in exchanges(row, members, causal=causal).items():
        for each in exchange.rounds:
            near = node_of(each.peer) == node_of(device)
            found[near] += sum(part.size for part in (*each.takes, *each.takes, *each.gets)) * 2
        for messages in exchange.heads_messages:
            near = node_of(messages.peer) == node_of(device)
            queries = sum(part.size for part in (*messages.takes_queries, *messages.sends_queries))
            keys = sum(part.size for part in (*messages.takes_keys, *messages.sends_keys))
            found[near] += 2 * queries + 2 * keys
    return found[0], found[1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("nodes", ["aa", "aaaa", "aaaaaaaa", "aabb", "aaaabbbb"])
@pytest.mark.parametrize("kv_heads", [1, 4, 8, 32])
def test_the_form_that_moves_fewer_bytes_is_taken(
    kv_heads: int, nodes: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte between nodes counts as six."""
    members, shares = lanes_of(nodes, 32, kv_heads), dict.fromkeys(range(len(nodes)), 1)
    row = row_of(len(nodes), [(4096, shares)])
    taken = any(exchange.heads for exchange in exchanges(row, members, causal=causal).values())
    moves = {}
    for form in (True, False):
        chosen = divided_heads if form else lambda members, held, length: None
        monkeypatch.setattr(context_exchanges, "heads_form", lambda m, h, n, form=chosen, **of: form(m, h, n))
        between, inside = moved(row, members, causal=causal)
        moves[form] = BETWEEN_NODES * between + inside
    assert taken == (moves[True] < moves[False]), moves
    assert not taken or kv_heads > 1


def test_heads_are_divided_as_tokens_are_or_not_at_all() -> None:
    members = lanes_of("aaaa", 32, 32)
    even = exchanges(row_of(4, [(4096, {0: 3, 1: 3, 2: 1, 3: 1})]), members)
    assert [exchange.heads[0].last - exchange.heads[0].first for exchange in even.values()] == [12, 12, 4, 4]
    uneven = exchanges(row_of(4, [(4096, {0: 20, 1: 20, 2: 20, 3: 1})]), members)
    assert not any(exchange.heads for exchange in uneven.values())


def test_under_a_narrow_window_keys_are_exchanged() -> None:
    members = lanes_of("aaaa", 32, 32)
    row = row_of(4, [(4096, dict.fromkeys(range(4), 1))])
    assert all(exchange.heads for exchange in exchanges(row, members).values())
    assert not any(exchange.heads for exchange in exchanges(row, members, 64).values())


@pytest.mark.parametrize(("nodes", "least"), [("aabb", 0.5), ("aaaabbbb", 0.25), ("aaabbbccc", 1 / 3)])
def test_keys_of_another_node_come_once_for_all_its_lanes(
    nodes: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = lanes_of(nodes, 32, 1)
    row = row_of(len(nodes), [(4096, dict.fromkeys(range(len(nodes)), 1))])
    once, _ = moved(row, members)
    lanes = [
        {each.peer for each in exchange.rounds if node_of(each.peer) != node_of(device)}
        for device, exchange in exchanges(row, members).items()
    ]
    assert all(lanes), "each has a part of what comes to its node"
    monkeypatch.setattr(context_exchanges, "_fewer_bytes", lambda *given: False)
    several, _ = moved(row, members)
    assert once < (least + 0.16) * several  # the last keys are not needed by all lanes of a node


def test_small_rounds_are_one() -> None:
    members = lanes_of("aabbcc", 8, 1)
    row = row_of(6, [(600, {0: 1, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}), (40, {1: 1, 4: 1})])
    apart = {d: context_exchange(row, members, d) for d in members.index}
    for together in (1, 300, 900, 10**6):
        found = {d: context_exchange(row, members, d, together=together) for d in members.index}
        for device, exchange in found.items():
            order = [(each.last, each.peer) for each in exchange.rounds]
            assert sorted(order) == sorted((each.last, each.peer) for each in apart[device].rounds)
            by_number = defaultdict(set)
            for each in exchange.rounds:
                by_number[each.number].add(each.last)
                (its,) = (at for at in found[each.peer].rounds if at.peer == device)
                assert its.number == each.number
                assert (its.takes, its.gets) == (each.sends, each.gives)
            assert all(len(kinds) == 1 for kinds in by_number.values()), (
                "what is passed on comes in a round before"
            )
        if together == 10**6:
            assert {each.number for exchange in found.values() for each in exchange.rounds} == {0, 1}


def test_a_device_of_the_same_node_is_asked_first() -> None:
    """Where several members of a lane hold the same heads."""
    stage = Stage(
        start=0,
        stop=2,
        devices=("a/0", "b/0", "a/1", "b/1"),
        shares=(1, 1, 1, 1),
        lanes=(2, 2),
    )
    members = context_members(SPEC, stage, "a/0", 3, 3)  # of another number than units have: all hold all
    assert {member.kv_heads for member in members.members} == {(0, 3)}
    for device, exchange in exchanges(row_of(2, [(40, {0: 1, 1: 1})]), members).items():
        assert [each.peer.split("/")[0] for each in exchange.rounds] == [device.split("/")[0]]


def test_members_take_turns_where_none_is_nearer() -> None:
    stage = Stage(start=0, stop=2, devices=("a/0", "a/1", "b/0", "b/1"), shares=(1, 1, 1, 1), lanes=(2, 2))
    members = context_members(SPEC, stage, "a/0", 3, 3)
    found = exchanges(row_of(2, [(40, {0: 1, 1: 1})]), members)
    assert {device: [each.peer for each in exchange.rounds] for device, exchange in found.items()} == {
        "a/0": ["b/0"],
        "a/1": ["b/1"],
        "b/0": ["a/0"],
        "b/1": ["a/1"],
    }


def test_two_lanes_need_one_round() -> None:
    for lanes in (2, 3, 8):
        row = row_of(lanes, [(64, {0: 1, lanes - 1: 1})])
        found = exchanges(row, members_of(stage_of(*[(1,)] * lanes)))
        assert [each.number for each in found["a/0"].rounds] == [0]
        assert all(each.sends and each.takes for each in found["a/0"].rounds)


def test_heads_of_members_are_known_from_what_one_computes() -> None:
    stage = stage_of((1,), (5, 3))
    cut_heads = context_members(SPEC, stage, "a/0", 8, 4)
    assert [member.heads for member in cut_heads.members] == [(0, 8), (0, 5), (5, 8)]
    assert [member.kv_heads for member in cut_heads.members] == [(0, 4), (0, 3), (2, 4)]
    repeated = context_members(SPEC, stage, "b/0", 5, 5)  # 5 heads over 3 kv-heads: one for each head
    assert repeated.members == cut_heads.members
    multi_head = context_members(SPEC, stage, "a/0", 8, 8)
    assert [member.kv_heads for member in multi_head.members] == [(0, 8), (0, 5), (5, 8)]
    alone = context_members(SPEC, stage, "b/1", 6, 2)  # no units are as many: the attention is not cut
    assert {(member.heads, member.kv_heads) for member in alone.members} == {((0, 6), (0, 2))}


def test_a_sample_that_is_in_a_row_twice_is_two_sequences() -> None:
    first, second = cut(3, 20, {0: 1, 1: 1}), cut(3, 20, {0: 1, 1: 1})
    row = ((first[0], second[0]), (first[1], second[1]))
    found = exchanges(row, members_of(stage_of((1,), (1,))))
    assert [len(set(exchange.sequences)) for exchange in found.values()] == [2, 2]
    assert sorted(found["a/0"].sequences) == sorted(found["b/0"].sequences)


def test_a_sequence_with_a_gap_is_refused() -> None:
    pieces = cut(3, 20, {0: 1, 1: 1, 2: 1})
    members = members_of(stage_of((1,), (1,), (1,)))
    with pytest.raises(Invalid, match="sample 3: no lane has its pairs before"):
        context_exchange(((pieces[0],), (), (pieces[2],)), members, "a/0")
    with pytest.raises(Invalid, match="sample 3: no lane of the row has its pairs from"):
        context_exchange(((pieces[0],), (pieces[1],), ()), members, "a/0")
