"""Box arithmetic against masks of NumPy arrays."""

import numpy as np
import numpy.typing as npt
import pytest
from elasticd_planner.spec.box import Box, Holding, TensorLayout, covered, cut, lacking, subtract
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)
Mask = npt.NDArray[np.int64]


@st.composite
def boxes_of(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    found = []
    for _ in range(count):
        edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        found.append(Box(start=tuple(a for a, _ in edges), stop=tuple(b for _, b in edges)))
    return shape, found


def mask(shape: tuple[int, ...], *boxes: Box) -> Mask:
    """How many of the boxes cover each element."""
    covered = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        covered[box.slices(Box.whole(shape))] += 1
    return covered


@given(boxes_of(2))
def test_overlap_is_what_both_cover(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    common = a.overlap(b)
    both = mask(shape, a) * mask(shape, b)
    assert (mask(shape, *([common] if common else [])) == both).all()
    assert a.size == mask(shape, a).sum()
    assert a.contains(b) or b.empty or bool(((mask(shape, b) == 1) & (mask(shape, a) == 0)).any())


@given(boxes_of(2))
def test_minus_gives_disjoint_boxes_of_what_the_other_does_not_cover(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, (a, b) = case
    rest = a.minus(b)
    assert (mask(shape, *rest) == mask(shape, a) * (1 - mask(shape, b))).all()
    assert not any(box.empty for box in rest)


@given(boxes_of(4))
def test_subtract_leaves_what_no_other_covers(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, *others) = case
    assert (mask(shape, *subtract(a, others)) == mask(shape, a) * (mask(shape, *others) == 0)).all()


@given(boxes_of(3))
def test_cells_cover_the_union_once_and_no_border_runs_through_one(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = case
    cells = list(cut(boxes))
    assert (mask(shape, *cells) == (mask(shape, *boxes) > 0)).all()
    for cell in cells:
        for box in boxes:
            assert box.contains(cell) or box.overlap(cell) is None


@given(boxes_of(4))
def test_the_cells_of_some_boxes_are_those_of_all_that_lie_in_them(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    _, boxes = case
    for mine in (set(), {boxes[0]}, {*boxes[2:]}):
        inside = [(cell, around) for cell, around in covered(boxes) if not mine.isdisjoint(around)]
        assert list(covered(boxes, mine)) == inside


def layout(shape: tuple[int, ...], holdings: list[tuple[str, Box]]) -> TensorLayout:
    return TensorLayout(
        name="w",
        shape=shape,
        dtype="float32",
        holdings=tuple(Holding(device=device, box=box) for device, box in holdings),
    )


@settings(max_examples=examples(60))
@given(boxes_of(6))
def test_lacking_is_each_element_wanted_and_not_held_once(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = case
    devices = ["a", "b", "a"]
    old = layout(shape, list(zip(devices, boxes[:3], strict=True)))
    new = layout(shape, list(zip(devices, boxes[3:], strict=True)))
    lacks = lacking(old, new)
    for device in "ab":
        wanted = (mask(shape, *new.of(device)) > 0) & (mask(shape, *old.of(device)) == 0)
        assert (mask(shape, *lacks.get(device, ())) == wanted).all()


def test_everything_lacks_where_nothing_was_held() -> None:
    whole = Box.whole((2, 3))
    assert lacking(None, layout((2, 3), [("a", whole)])) == {"a": (whole,)}


def test_a_scalar_is_one_box_without_dimensions() -> None:
    scalar = Box.whole(())
    assert scalar.size == 1
    assert not scalar.empty
    assert scalar.minus(scalar) == ()
    assert list(cut([scalar])) == [scalar]
    held = layout((), [("a", scalar)])
    assert (lacking(None, held), lacking(held, held)) == ({"a": (scalar,)}, {})


def test_slices_find_a_box_inside_another() -> None:
    outer, inner = Box(start=(2, 1), stop=(6, 4)), Box(start=(3, 1), stop=(5, 2))
    whole = np.arange(24).reshape(6, 4)
    local = whole[outer.slices(Box.whole((6, 4)))]
    assert (local[inner.slices(outer)] == whole[3:5, 1:2]).all()


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [((0,), (1, 2), "number of dimensions"), ((2,), (1,), "between 0 and stop"), ((-1,), (1,), "between 0")],
)
def test_a_wrong_box_is_refused(start: tuple[int, ...], stop: tuple[int, ...], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Box(start=start, stop=stop)


def test_a_holding_outside_of_its_tensor_is_refused() -> None:
    with pytest.raises(Invalid, match=r"w: a holds .* outside of shape"):
        layout((2,), [("a", Box(start=(0,), stop=(3,)))])
