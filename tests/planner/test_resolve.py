"""The communication between two layouts: exact on integers, forth and back; which operations it is."""

from __future__ import annotations

import random

import pytest
from elasticd_planner.layout.resolve import Uncovered, dual, resolve
from elasticd_planner.spec.box import Box, Holding, TensorLayout
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import played_steps

SEEDS = st.integers(0, 2**32 - 1)


def layout(*holdings: tuple[str, slice, str | None] | tuple[str, slice], rows: int = 12) -> TensorLayout:
    """Of a tensor of `rows` rows: (device, rows, term)."""
    return TensorLayout(
        name="x",
        shape=(rows,),
        dtype="float32",
        holdings=tuple(
            Holding(
                device=device,
                box=Box(start=(part.start or 0,), stop=(rows if part.stop is None else part.stop,)),
                partial=term[0] if term else None,
            )
            for device, part, *term in holdings
        ),
    )


ALL = slice(None)


def operations(source: TensorLayout, target: TensorLayout, *, agree: bool = False) -> list[tuple[str, str]]:
    steps = resolve(source, target, agree=agree)
    return [(step.operation, " ".join(step.devices)) for step in steps]


@given(SEEDS)
def test_any_layout_becomes_any_other_and_no_more_is_sent_than_is_lacking(seed: int) -> None:
    source, target = played_steps.drawn_pair(random.Random(seed))
    played_steps.check_value(source, target, seed)


@given(SEEDS, st.booleans())
def test_gradients_go_the_way_back(seed: int, add: bool) -> None:
    source, target = played_steps.drawn_pair(random.Random(seed), whole=True)
    played_steps.check_adjoint(source, target, seed, add=add)


# -- the operations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # Identity, and a sum that is one already.
        (layout(("a/0", ALL)), layout(("a/0", ALL)), [("keep", "a/0")]),
        (layout(("a/0", ALL, "t")), layout(("a/0", ALL)), [("keep", "a/0")]),
        (layout(("a/0", ALL)), layout(("b/0", ALL)), [("send", "a/0 b/0")]),
        # Column-parallel output, gathered; its gradient is a slice.
        (
            layout(("a/0", slice(0, 7)), ("a/1", slice(7, 12))),
            layout(("a/0", ALL), ("a/1", ALL)),
            [("all_gather", "a/0 a/1")],
        ),
        (
            layout(("a/0", ALL), ("a/1", ALL)),
            layout(("a/0", slice(0, 7)), ("a/1", slice(7, 12))),
            [("keep", "a/0"), ("keep", "a/1")],
        ),
        # Row-parallel output; with sequence parallelism.
        (
            layout(("a/0", ALL, "0"), ("a/1", ALL, "1")),
            layout(("a/0", ALL), ("a/1", ALL)),
            [("all_reduce", "a/0 a/1")],
        ),
        (
            layout(("a/0", ALL, "0"), ("a/1", ALL, "1")),
            layout(("a/0", slice(0, 7)), ("a/1", slice(7, 12))),
            [("reduce_scatter", "a/0 a/1")],
        ),
        # A parameter cut three ways beside two: three sets of holders.
        (
            layout(
                *((f"a/{i}", slice(4 * i, 4 * i + 4), "p") for i in range(3)),
                *((f"b/{i}", slice(6 * i, 6 * i + 6), "q") for i in range(2)),
            ),
            layout(
                *((f"a/{i}", slice(4 * i, 4 * i + 4)) for i in range(3)),
                *((f"b/{i}", slice(6 * i, 6 * i + 6)) for i in range(2)),
            ),
            [
                ("all_reduce", "a/0 b/0"),
                ("all_reduce", "a/1 b/0"),
                ("all_reduce", "a/1 b/1"),
                ("all_reduce", "a/2 b/1"),
            ],
        ),
        # Terms to other devices, and one of them to more than one.
        (
            layout(("a/0", ALL, "0"), ("a/1", ALL, "1")),
            layout(("a/1", ALL), ("b/0", ALL)),
            [("sum", "a/0 a/1"), ("relay", "a/1 b/0")],
        ),
        # A stage boundary: three members whole, two members whole.
        (
            layout(*((f"a/{i}", ALL) for i in range(2))),
            layout(*((f"b/{i}", ALL) for i in range(3))),
            [("send", "a/0 b/0 b/2"), ("send", "a/1 b/1")],
        ),
        # A value as a term.
        (
            layout(("a/0", ALL)),
            layout(("b/0", ALL, "0"), ("a/0", ALL, "1")),
            [("keep", "a/0"), ("zero", "b/0")],
        ),
    ],
)
def test_the_operation_is_the_one_that_the_layouts_ask_for(
    source: TensorLayout, target: TensorLayout, expected: list[tuple[str, str]]
) -> None:
    assert operations(source, target) == expected


def test_holders_are_of_one_node_where_they_can_be_and_take_turns() -> None:
    source = layout(("a/0", ALL), ("b/0", ALL), ("b/1", ALL))
    target = layout(("b/2", ALL), ("b/3", ALL), ("c/0", ALL), ("a/1", ALL))
    assert operations(source, target) == [
        ("send", "a/0 c/0 a/1"),
        ("send", "b/0 b/2"),
        ("send", "b/1 b/3"),
    ]


def test_two_devices_that_computed_one_value_can_be_made_to_agree_on_it() -> None:
    both = layout(("a/0", ALL, "t"), ("a/1", ALL, "t"))
    (step,) = resolve(both, dual(both), agree=True)
    assert step.operation == "all_reduce"
    assert step.cells[0].sources == ("a/0",)


def test_terms_become_terms_where_they_are() -> None:
    source = layout(*((f"{node}/{i}", ALL, f"{node}{i}") for node in "ab" for i in range(2)))
    inside = layout(*((f"{node}/{i}", slice(6 * i, 6 * i + 6), node) for node in "ab" for i in range(2)))
    assert operations(source, inside) == [("reduce_scatter", "a/0 a/1"), ("reduce_scatter", "b/0 b/1")]


# -- what cannot be ------------------------------------------------------------------------------------------


def test_a_box_that_nobody_holds_is_named() -> None:
    with pytest.raises(
        Uncovered, match=r"x: no device holds \(6,\) to \(9,\), and the target needs it"
    ) as raised:
        resolve(layout(("a/0", slice(0, 6)), ("a/1", slice(9, 12))), layout(("a/0", ALL)))
    assert raised.value.boxes == (Box(start=(6,), stop=(9,)),)


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (layout(("a/0", ALL)), layout(("a/0", ALL), rows=13), r"x \(12,\) cannot become x \(13,\)"),
        (
            layout(("a/0", ALL)),
            layout(("a/0", ALL), ("a/1", slice(4, 5), "t")),
            r"x \(4,\) to \(5,\): value on one device, term on another",
        ),
        (
            layout(("a/0", ALL, "s"), ("a/0", slice(4, 5), "t")),
            layout(("a/0", ALL)),
            r"x \(4,\) to \(5,\): a/0 holds two terms",
        ),
    ],
)
def test_layouts_without_a_meaning_are_refused(source: TensorLayout, target: TensorLayout, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        resolve(source, target)
