"""Shares become units; members' boxes; specs that contradict themselves are refused."""

import msgspec
import pytest
from elasticd_planner.spec.model import Cut, ModelSpec, Units, apportion, member_box, unit_range
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.models import SPEC, parameter

SHARES = st.lists(st.integers(1, 1000), min_size=1, max_size=8).map(tuple)


@given(SHARES, st.integers(0, 60))
def test_apportion_gives_everybody_a_unit_and_no_unit_twice(shares: tuple[int, ...], more: int) -> None:
    count = len(shares) + more
    given_units = apportion(count, shares)
    assert sum(given_units) == count
    assert min(given_units) >= 1


@given(SHARES, st.integers(0, 60))
def test_apportion_stays_within_one_unit_of_the_share_where_each_is_due_one(
    shares: tuple[int, ...], more: int
) -> None:
    count = len(shares) + more
    due = [count * share / sum(shares) for share in shares]
    if min(due) >= 1:
        assert all(abs(a - b) < 1 for a, b in zip(apportion(count, shares), due, strict=True))


def test_three_members_share_eight_heads_as_three_three_two() -> None:
    assert apportion(8, (1, 1, 1)) == (3, 3, 2)
    assert apportion(8, (3, 1)) == (6, 2)
    assert apportion(4, (1000, 1, 1)) == (2, 1, 1)


def test_a_group_wider_than_the_units_is_refused_with_the_remedy() -> None:
    with pytest.raises(Invalid, match="use a narrower group"):
        apportion(2, (1, 1, 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple))
def test_members_divide_leading_units_and_touch_the_following_ones(shares: tuple[int, ...]) -> None:
    heads = [unit_range(SPEC, "heads", shares, i) for i in range(len(shares))]
    assert [unit for units in heads for unit in units] == list(range(4))
    for position, led in enumerate(heads):
        kv_heads = unit_range(SPEC, "kv_heads", shares, position)
        assert set(kv_heads) == {head // 2 for head in led}


def test_a_cut_inside_a_kv_group_puts_its_kv_head_on_both_sides() -> None:
    assert [unit_range(SPEC, "kv_heads", (3, 1), i) for i in (0, 1)] == [range(2), range(1, 2)]


def test_a_member_holds_a_slice_of_the_cut_dimension_alone() -> None:
    column, row = SPEC.kinds[0][1], SPEC.kinds[0][3]
    assert member_box(SPEC, column, (3, 1), 1).start == (6, 0)
    assert member_box(SPEC, row, (3, 1), 1).start == (0, 6)
    assert member_box(SPEC, SPEC.kinds[0][0], (3, 1), 1).shape == (8,)


def test_sections_of_the_first_stage_have_embed_and_of_the_last_head() -> None:
    assert list(SPEC.sections(0, 1)) == ["embed", "blocks.0"]
    assert list(SPEC.sections(1, 3)) == ["blocks.1", "blocks.2", "head"]
    assert SPEC.owner("head.output.weight") == "embed.tokens.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (0, 1)}, "layers must name one of its 1 kinds"),
        ({"layers": ()}, "layers must name"),
        ({"embed": (parameter("e", 8, cut=(0, "bones")),)}, "unknown units 'bones'"),
        ({"embed": (parameter("e", 9, cut=(0, "heads")),)}, "does not divide into 4 heads"),
        ({"embed": (parameter("e", 8, cut=(1, "heads")),)}, "dimension 1 of e"),
        ({"units": (Units(kind="heads", count=4), Units(kind="kv_heads", count=3, follows="heads"))}, "cannot"),
        ({"ties": (("head.output.weight", "embed.nothing"),)}, r"tied parameter 'embed\.nothing'"),
        ({"ties": (("head.norm.weight", "embed.tokens.weight"),)}, "tied parameters .* must be alike"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        msgspec.structs.replace(SPEC, **changes)


def test_replicas_of_a_following_unit_must_add() -> None:
    kind = (*SPEC.kinds[0], parameter("v.weight", 4, 8, cut=(0, "kv_heads")))
    with pytest.raises(Invalid, match=r"v\.weight follows heads.*replicas.*'add'"):
        msgspec.structs.replace(SPEC, kinds=(kind,))


def test_a_spec_survives_json() -> None:
    text = msgspec.json.encode(SPEC)
    assert msgspec.json.decode(text, type=ModelSpec) == SPEC
    assert isinstance(msgspec.json.decode(text, type=ModelSpec).embed[0].cut, Cut)
