"""Rounds: every piece once, bounded at both ends, small ones packed, large ones as they lie."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product

import numpy as np
import pytest
from elasticd_migration.reshard import Transfer, reshard
from elasticd_migration.rounds import PACK_BELOW, Message, Piece, run, schedule
from elasticd_migration.schema import Plane
from elasticd_planner.layout.layouts import Item, Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.migration.plans import SPEC, alone, plans
from tests.sizes import examples

VALUE, MOMENT = (
    Plane(name="value", dtype="bfloat16", itemsize=2),
    Plane(name="exp_avg", dtype="float32", itemsize=4),
)
PLANES = dict.fromkeys(Layouts(SPEC, alone()).items, (VALUE, MOMENT))
SIZES = dict.fromkeys(PLANES, 6)


@settings(max_examples=examples(25))
@given(plans(1), plans(2), st.sampled_from([600, 5000, 1 << 20]))
def test_every_piece_is_sent_once_within_the_limit(before: Plan, after: Plan, limit: int) -> None:
    transfers = reshard(Layouts(SPEC, before), Layouts(SPEC, after), SIZES)
    rounds = schedule(transfers, PLANES, limit=limit)
    elements: Counter[tuple[Item, str, str, str]] = Counter()
    for turn in rounds:
        out: Counter[str] = Counter()
        into: Counter[str] = Counter()
        for message in turn.messages:
            out[message.source] += message.bytes
            into[message.destination] += message.bytes
            for piece in message.pieces:
                elements[piece.item, piece.plane, message.source, message.destination] += piece.box.size
        assert max([*out.values(), *into.values()]) <= limit
    expected: Counter[tuple[Item, str, str, str]] = Counter()
    for transfer in transfers:
        for item, plane in product(transfer.items, (VALUE, MOMENT)):
            key = item, plane.name, transfer.source, transfer.destination
            expected[key] += transfer.box.size
    assert elements == expected


@settings(max_examples=examples(10))
@given(plans(1), plans(2), st.sampled_from([600, 5000]))
def test_each_device_finds_its_own_part_of_the_same_rounds(before: Plan, after: Plan, limit: int) -> None:
    transfers = reshard(Layouts(SPEC, before), Layouts(SPEC, after), SIZES)
    rounds = schedule(transfers, PLANES, limit=limit)
    for device in sorted({*before.members, *after.members})[:3]:
        mine = schedule(transfers, PLANES, limit=limit, me=device)
        assert [(t.sent_by(device), t.received_by(device)) for t in mine] == [
            (t.sent_by(device), t.received_by(device)) for t in rounds
        ]


@settings(max_examples=examples(200))
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_run_of_elements_is_few_disjoint_boxes_in_the_order_of_memory(
    shape: list[int], data: st.DataObject
) -> None:
    box = Box(start=(3,) * len(shape), stop=tuple(3 + extent for extent in shape))
    start = data.draw(st.integers(0, box.size))
    stop = data.draw(st.integers(start, box.size))
    places = np.arange(box.size).reshape(shape)
    parts = list(run(box, start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)
    found = [int(place) for part in parts for place in places[part.slices(box)].reshape(-1)]
    assert found == list(range(start, stop))


def test_a_large_tensor_is_divided_between_rounds_in_runs_of_rows() -> None:
    (first, second) = schedule(transfers_of({"a": (100, 4)}), of_items("a", MOMENT), limit=1000)
    boxes = [piece.box for turn in (first, second) for m in turn.messages for piece in m.pieces]
    assert [box.shape for box in boxes] == [(61, 4), (39, 4)]


def test_devices_go_through_the_model_together_and_both_ways_at_once() -> None:
    """What one gives up and what it gets come round by round: in place, little more is held than before."""
    names = [f"t{i}" for i in range(40)]
    there = [
        Transfer(name=n, roles=("value",), box=Box.whole((100,)), source="a/0", destination="b/0")
        for n in names
    ]
    back = [
        Transfer(name=f"u{n}", roles=("value",), box=Box.whole((100,)), source="b/0", destination="a/0")
        for n in names
    ]
    planes = of_items([*names, *(f"u{n}" for n in names)], MOMENT)
    rounds = schedule([*there, *back], planes, limit=2000)
    assert len(rounds) == 9
    for turn in rounds:
        for device in ("a/0", "b/0"):
            sent = sum(message.bytes for message in turn.sent_by(device))
            assert abs(sent - sum(message.bytes for message in turn.received_by(device))) < 100
    order = [piece.item.name for turn in rounds for message in turn.sent_by("a/0") for piece in message.pieces]
    assert list(dict.fromkeys(order)) == names


def transfers_of(shapes: Mapping[str, tuple[int, ...]], destination: str = "n0/1") -> list[Transfer]:
    return [
        Transfer(name=name, roles=("value",), box=Box.whole(shape), source="n0/0", destination=destination)
        for name, shape in shapes.items()
    ]


def of_items(names: Iterable[str], *planes: Plane) -> dict[Item, tuple[Plane, ...]]:
    return {Item(name, "value"): planes for name in names}


def test_small_pieces_of_a_pair_share_a_message_and_large_ones_go_alone() -> None:
    shapes = {"a": (4,), "large": (PACK_BELOW // 2,), "b": (5,)}
    (turn,) = schedule(transfers_of(shapes), of_items(shapes, VALUE, MOMENT), limit=1 << 20)
    packed = [[(piece.item.name, piece.plane) for piece in message.pieces] for message in turn.messages]
    assert packed == [
        [("large", "value")],
        [("large", "exp_avg")],
        [("a", "exp_avg"), ("b", "exp_avg"), ("a", "value"), ("b", "value")],
    ]


def test_pieces_of_different_pairs_never_share_a_message() -> None:
    planes = of_items("ab", VALUE)
    transfers = [*transfers_of({"a": (4,)}), *transfers_of({"b": (4,)}, "n0/2")]
    (turn,) = schedule(transfers, planes)
    assert len(turn.messages) == 2
    assert [message.destination for message in turn.sent_by("n0/0")] == ["n0/1", "n0/2"]
    assert len(turn.received_by("n0/2")) == 1


def test_pieces_in_a_message_start_at_multiples_of_their_width() -> None:
    narrow = Piece.of(Item("a", "value"), Plane(name="value", dtype="uint8", itemsize=1), Box.whole((3,)))
    wide = Piece.of(Item("b", "value"), Plane(name="value", dtype="int64", itemsize=8), Box.whole((3,)))
    assert Message(source="x/0", destination="x/1", pieces=(wide, narrow)).bytes == 27
    with pytest.raises(Invalid, match="widest elements first"):
        Message(source="x/0", destination="x/1", pieces=(narrow, wide))


def test_receivers_beyond_one_round_are_served_in_later_ones() -> None:
    shapes = {f"t{i}": (100,) for i in range(6)}
    rounds = schedule(transfers_of(shapes), of_items(shapes, MOMENT), limit=800)
    sizes = [sum(message.bytes for message in turn.messages) for turn in rounds]
    assert len(sizes) == 4
    assert sum(sizes) == 2400
    assert max(sizes) <= 800


def test_nothing_to_move_is_no_round_and_no_limit_is_refused() -> None:
    assert schedule([], {}) == ()
    with pytest.raises(ValueError, match="at least one byte"):
        schedule([], {}, limit=0)
    with pytest.raises(ValueError, match="at least 8 elements of 4 bytes, not 31 bytes"):
        schedule(transfers_of({"a": (100,)}), of_items("a", MOMENT), limit=31)
