"""Rounds: every piece once, bounded at both ends, small ones packed, large ones as they lie."""

from collections import Counter
from collections.abc import Mapping

import pytest
from elasticd_migration.reshard import Transfer, reshard
from elasticd_migration.rounds import PACK_BELOW, Message, Piece, schedule, split
from elasticd_migration.schema import Plane
from elasticd_planner.boxes import Box, subtract
from elasticd_planner.layouts import Layouts
from elasticd_planner.plan import Plan
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.migration.plans import LAYERS, SPEC, plan, plans

VALUE, MOMENT = (
    Plane(name="value", dtype="bfloat16", itemsize=2),
    Plane(name="exp_avg", dtype="float32", itemsize=4),
)
PLANES = dict.fromkeys(Layouts(SPEC, plan(0, [(LAYERS, [("n0/0", 1)])])).names, (VALUE, MOMENT))
SIZES = dict.fromkeys(PLANES, 6)


@settings(max_examples=25, deadline=None)
@given(plans(1), plans(2), st.sampled_from([600, 5000, 1 << 20]))
def test_every_piece_is_sent_once_within_the_limit(before: Plan, after: Plan, limit: int) -> None:
    transfers = reshard(Layouts(SPEC, before), Layouts(SPEC, after), SIZES)
    rounds = schedule(transfers, PLANES, limit=limit)
    elements: Counter[tuple[str, str, str, str]] = Counter()
    for turn in rounds:
        out: Counter[str] = Counter()
        into: Counter[str] = Counter()
        for message in turn.messages:
            out[message.source] += message.bytes
            into[message.destination] += message.bytes
            for piece in message.pieces:
                elements[piece.name, piece.plane, message.source, message.destination] += piece.box.size
        assert max([*out.values(), *into.values()]) <= limit
    expected: Counter[tuple[str, str, str, str]] = Counter()
    for transfer in transfers:
        for plane in (VALUE, MOMENT):
            key = transfer.name, plane.name, transfer.source, transfer.destination
            expected[key] += transfer.box.size
    assert elements == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 40))
def test_split_parts_are_small_disjoint_and_make_up_the_box(shape: list[int], elements: int) -> None:
    box = Box(start=(3,) * len(shape), stop=tuple(3 + extent for extent in shape))
    parts = list(split(box, elements))
    assert all(0 < part.size <= elements for part in parts)
    assert sum(part.size for part in parts) == box.size
    assert not subtract(box, parts)


def test_a_large_tensor_is_split_into_runs_of_rows() -> None:
    parts = list(split(Box.whole((10, 4)), 12))
    assert [part.shape for part in parts] == [(3, 4), (3, 4), (3, 4), (1, 4)]


def transfers_of(shapes: Mapping[str, tuple[int, ...]], destination: str = "n0/1") -> list[Transfer]:
    return [
        Transfer(name=name, box=Box.whole(shape), source="n0/0", destination=destination)
        for name, shape in shapes.items()
    ]


def test_small_pieces_of_a_pair_share_a_message_and_large_ones_go_alone() -> None:
    shapes = {"a": (4,), "large": (PACK_BELOW // 2,), "b": (5,)}
    (turn,) = schedule(transfers_of(shapes), dict.fromkeys(shapes, (VALUE, MOMENT)), limit=1 << 20)
    packed = [[(piece.name, piece.plane) for piece in message.pieces] for message in turn.messages]
    assert packed == [
        [("large", "value")],
        [("large", "exp_avg")],
        [("a", "exp_avg"), ("b", "exp_avg"), ("a", "value"), ("b", "value")],
    ]


def test_pieces_of_different_pairs_never_share_a_message() -> None:
    planes = dict.fromkeys("ab", (VALUE,))
    transfers = [*transfers_of({"a": (4,)}), *transfers_of({"b": (4,)}, "n0/2")]
    (turn,) = schedule(transfers, planes)
    assert len(turn.messages) == 2
    assert [message.destination for message in turn.sent_by("n0/0")] == ["n0/1", "n0/2"]
    assert len(turn.received_by("n0/2")) == 1


def test_pieces_in_a_message_start_at_multiples_of_their_width() -> None:
    narrow = Piece(name="a", plane="value", box=Box.whole((3,)), itemsize=1)
    wide = Piece(name="b", plane="value", box=Box.whole((3,)), itemsize=8)
    assert Message(source="x/0", destination="x/1", pieces=(wide, narrow)).bytes == 27
    with pytest.raises(Invalid, match="widest elements first"):
        Message(source="x/0", destination="x/1", pieces=(narrow, wide))


def test_receivers_beyond_one_round_are_served_in_later_ones() -> None:
    shapes = {f"t{i}": (100,) for i in range(6)}
    rounds = schedule(transfers_of(shapes), dict.fromkeys(shapes, (MOMENT,)), limit=800)
    assert [sum(message.bytes for message in turn.messages) for turn in rounds] == [800, 800, 800]


def test_nothing_to_move_is_no_round_and_no_limit_is_refused() -> None:
    assert schedule([], {}) == ()
    with pytest.raises(ValueError, match="at least one byte"):
        schedule([], {}, limit=0)
