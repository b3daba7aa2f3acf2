"""Annotations: the layouts that they say, their way back from layouts, and what they refuse."""

from __future__ import annotations

import random

import pytest
from elasticd_planner.layout.annotations import Annotation, alike, annotated, layout_of
from elasticd_planner.spec.box import Box, Holding, TensorLayout
from elasticd_planner.value import Invalid
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import played_steps
from tests.planner.drawn_annotations import drawn_annotation

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = ((24,), (16, 17), (16, 16, 18))

W = Annotation(
    groups=[("n0/0", "n0/1", "n0/2", "n0/3"), ("n1/0", "n1/1"), ("n1/2",)], states=[{0: 4}, {0: 2}, {}]
)


def held(annotation: Annotation, *shape: int) -> list[tuple[str, str, str | None]]:
    """(device, box as slices, term)"""
    return [
        (
            h.device,
            ",".join(f"{a}:{b}" for a, b in zip(h.box.start, h.box.stop, strict=True)),
            h.partial,
        )
        for h in annotation.layout(shape).holdings
    ]


# -- from annotations to layouts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (
            W,
            [
                ("n0/0", "0:2,0:3", None),
                ("n0/1", "2:4,0:3", None),
                ("n0/2", "4:6,0:3", None),
                ("n0/3", "6:8,0:3", None),
                ("n1/0", "0:4,0:3", None),
                ("n1/1", "4:8,0:3", None),
                ("n1/2", "0:8,0:3", None),
            ],
        ),
        # Uneven; and a dimension that does not divide.
        (Annotation(groups=[[*"ab"]], states=[{0: (3, 1)}]), [("a", "0:6,0:3", None), ("b", "6:8,0:3", None)]),
        (
            Annotation(groups=[[*"abc"]], states=[{0: 3}]),
            [("a", "0:3,0:3", None), ("b", "3:6,0:3", None), ("c", "6:8,0:3", None)],
        ),
        # The first axis is the outermost.
        (
            Annotation(groups=[[*"abcd"]], states=[{"same": 2, 0: 2}]),
            [("a", "0:4,0:3", None), ("b", "4:8,0:3", None), ("c", "0:4,0:3", None), ("d", "4:8,0:3", None)],
        ),
        (
            Annotation(groups=[[*"abcd"]], states=[{0: 2, "same": 2}]),
            [("a", "0:4,0:3", None), ("b", "0:4,0:3", None), ("c", "4:8,0:3", None), ("d", "4:8,0:3", None)],
        ),
        # Groups that split a dimension, evenly or not, and split it further inside.
        (
            Annotation(groups=[[*"ab"], [*"c"]], states=[{0: 2}, {}], across=0),
            [("a", "0:2,0:3", None), ("b", "2:4,0:3", None), ("c", "4:8,0:3", None)],
        ),
        (
            Annotation(groups=[[*"ab"], [*"c"]], states=[{1: (2, 1)}, {}], across={0: (3, 1)}),
            [("a", "0:6,0:2", None), ("b", "0:6,2:3", None), ("c", "6:8,0:3", None)],
        ),
        # Terms, of groups and inside them. Groups that are the same have the same terms.
        (
            Annotation(groups=[[*"ab"], [*"c"]], states=[{"sum": 2}, {}], across="sum"),
            [("a", "0:8,0:3", "0.0"), ("b", "0:8,0:3", "0.1"), ("c", "0:8,0:3", "1")],
        ),
        (
            Annotation(groups=[[*"ab"], [*"cd"]], states=[{"sum": 2}, {"sum": 2}], across="same"),
            [("a", "0:8,0:3", "0"), ("b", "0:8,0:3", "1"), ("c", "0:8,0:3", "0"), ("d", "0:8,0:3", "1")],
        ),
    ],
)
def test_a_layout_is_as_annotated(annotation: Annotation, expected: list[tuple[str, str, str | None]]) -> None:
    assert held(annotation, 8, 3) == expected


def test_layout_of_names_the_tensor() -> None:
    layout = layout_of(W, "blocks.0.q.weight", (8, 3), "bfloat16")
    assert (layout.name, layout.shape, layout.dtype) == ("blocks.0.q.weight", (8, 3), "bfloat16")


def test_annotations_are_equal_where_they_say_the_same_in_one_order_of_axes() -> None:
    one = Annotation(groups=[[*"abcd"]], states=[{"same": 2, 0: 2}])
    assert one == Annotation(groups=[("a", "b", "c", "d")], states=[{"same": 2, 0: 2}])
    assert hash(one) == hash(one.replace(across="same"))
    assert one != Annotation(groups=[[*"abcd"]], states=[{0: 2, "same": 2}])


# -- from layouts to annotations -----------------------------------------------------------------------------


@given(SEEDS)
def test_a_layout_that_an_annotation_says_is_read_back(seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.choice(SHAPES)
    layout = drawn_annotation(draw, shape).layout(shape)
    found = annotated(layout)
    assert found is not None
    assert alike(found.layout(shape), layout)


@given(SEEDS)
def test_what_is_read_of_any_layout_is_that_layout(seed: int) -> None:
    layout, _ = played_steps.drawn_pair(random.Random(seed))
    found = annotated(layout)
    assert found is None or alike(found.layout(layout.shape), layout)


@pytest.mark.parametrize(
    "annotation",
    [
        W,
        W.replace(across="sum"),
        Annotation(groups=[[*"abcd"]], states=[{"same": 2, 0: 2}]),
        Annotation(groups=[[*"abcd"]], states=[{0: 2, "same": 2}]),
        Annotation(groups=[[*"abcd"]], states=[{"sum": 2, 1: (2, 1)}]),
        Annotation(groups=[[*"ab"], [*"c"]], states=[{1: 2}, {}], across={0: (3, 1)}),
    ],
)
def test_the_simplest_annotation_comes_back_as_it_was(annotation: Annotation) -> None:
    assert annotated(annotation.layout((12, 6))) == annotation


def two_boxes(*holdings: tuple[str, tuple[int, int], tuple[int, int]]) -> TensorLayout:
    return TensorLayout(
        name="x",
        shape=(4, 4),
        dtype="float32",
        holdings=tuple(
            Holding(device=device, box=Box(start=(a, c), stop=(b, d))) for device, (a, b), (c, d) in holdings
        ),
    )


@pytest.mark.parametrize(
    "layout",
    [
        # Boxes like the bricks of a wall, round a hole.
        two_boxes(
            ("a", (0, 1), (0, 3)),
            ("b", (0, 3), (3, 4)),
            ("c", (3, 4), (1, 4)),
            ("d", (1, 4), (0, 1)),
            ("e", (1, 3), (1, 3)),
        ),
        two_boxes(("a", (0, 2), (0, 4)), ("a", (2, 4), (0, 4))),  # one device, two boxes
        two_boxes(("a", (0, 2), (0, 4))),  # a part alone
        two_boxes(("a", (0, 4), (0, 4)), ("b", (4, 4), (0, 4))),  # a device without units
        two_boxes(("a", (0, 3), (0, 4)), ("b", (1, 4), (0, 4))),  # overlapping
    ],
)
def test_a_layout_that_takes_more_than_two_tiers_has_no_annotation(layout: TensorLayout) -> None:
    assert annotated(layout) is None


def test_layouts_are_alike_whatever_terms_are_called_but_not_where_they_differ() -> None:
    one = Annotation(groups=[[*"ab"], [*"cd"]], states=[{"sum": 2}, {"sum": 2}], across="same").layout((4,))
    other = Annotation(groups=[[*"ab"], [*"dc"]], states=[{"sum": 2}, {"sum": 2}], across="same").layout((4,))
    assert alike(one, Annotation(groups=[[*"acbd"]], states=[{"sum": 2, "same": 2}]).layout((4,)))
    assert not alike(one, other)
    assert not alike(one, Annotation(groups=[[*"abcd"]], states=[{"same": 4}]).layout((4,)))


# -- HSPMD's files -------------------------------------------------------------------------------------------

#: The entry that the README of lhy101/HSPMD prints.
DENSE = {
    "split": {"0": [4, 1]},
    "dup": [2, 2],
    "device_group_union": [[28, 29, 30, 31], [38]],
    "type": "variable",
}


def test_an_entry_of_hspmd_counts_its_groups_and_so_is_read() -> None:
    found = Annotation.from_hspmd(DENSE)
    assert found == Annotation(
        groups=[("n3/4", "n3/5", "n3/6", "n3/7"), ("n4/6",)], states=[{0: 4}, {}], across="same"
    )
    assert found.to_hspmd() == DENSE


@pytest.mark.parametrize(
    "config",
    [
        {"split": {"0": [2]}, "dup": [4], "device_group_union": [[*range(8)]], "type": "variable"},
        {
            "split": {"0": [2, 2]},
            "dup": [4, 1],
            "device_group_union": [[0, 1, 2, 3], [4]],
            "type": "placeholder",
        },
        {"split": {}, "dup": [4, 2], "device_group_union": [[0, 1], [2]], "type": "variable"},
        {"split": {"1": [1, 2]}, "dup": [2, 2], "device_group_union": [[0], [1, 2]], "type": "variable"},
    ],
)
def test_entries_of_hspmd_come_back_identical(config: dict[str, object]) -> None:
    dims = [int(dim) for dim in config["split"]]  # type: ignore[attr-defined]
    assert Annotation.from_hspmd(config).to_hspmd(dims) == config


def test_devices_of_hspmds_files_are_those_of_the_nodes_that_are_named() -> None:
    nodes = ["a", "b", "c", "d", "gpu.7"]
    found = Annotation.from_hspmd(DENSE, nodes=nodes)
    assert found.groups == (("d/4", "d/5", "d/6", "d/7"), ("gpu.7/6",))
    assert found.to_hspmd(nodes=nodes) == DENSE
    with pytest.raises(Invalid, match="device 38 is on none of 4 nodes of 8 devices"):
        Annotation.from_hspmd(DENSE, nodes=nodes[:4])
    with pytest.raises(Invalid, match=r"device gpu.7/6 has no number .* its node is none of a, b, c, d"):
        found.to_hspmd(nodes=nodes[:4])


def test_like_groups_of_copies_are_one_group() -> None:
    two = Annotation(groups=[[*"ab"], [*"cd"]], states=[{0: 2}, {0: 2}])
    assert two.merged() == Annotation(groups=[[*"abcd"]], states=[{"same": 2, 0: 2}])
    assert W.merged() is W


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"groups": [], "states": []}, "0 groups need as many states"),
        ({"groups": [["a"]], "states": [0]}, "state 0 is no mapping of axes to parts"),
        ({"groups": [["a", "b"]], "states": [{0: 2.5}]}, "2.5 is neither a positive number"),
        ({"groups": ["n0/0"], "states": [{}]}, r"'n0/0' is a device, and its group is \('n0/0',\)"),
        ({"groups": [[*"ab"]], "states": [{0: 2}, {}]}, "1 groups need as many states, not 2"),
        ({"groups": [[*"ab"], [*"bc"]], "states": [{0: 2}, {0: 2}]}, "groups share device b"),
        (
            {"groups": [[*"abcd"]], "states": [{0: 2}]},
            r"state \{0: 2\} has places for 2 devices, its group has 4 \(a, b, c, d\): give it as many, or "
            '"same": 2 more',
        ),
        ({"groups": [[*"abc"]], "states": [{0: 2}]}, r"places for 2 devices, its group has 3 \(a, b, c\)"),
        ({"groups": [[*"ab"]], "states": [{-1: 2}]}, "-1 is neither a dimension nor"),
        ({"groups": [[*"ab"]], "states": [{"copies": 2}]}, "'copies' is neither a dimension nor"),
        ({"groups": [[*"ab"]], "states": [{"sum": (1, 1)}]}, "'sum' is a number of devices"),
        ({"groups": [[*"ab"]], "states": [{0: (2, 0)}]}, r"\(2, 0\) is neither a positive number"),
        ({"groups": [[*"ab"]], "states": [{0: 0}]}, "0 is neither a positive number"),
        ({"groups": [[*"abcd"]], "states": [{"tp": 2, 0: 2}]}, "'tp' stands for the dimension"),
        ({"groups": [[*"a"]], "states": [{}], "across": "sums"}, "across='sums' must be"),
        (
            {"groups": [[*"a"], [*"b"]], "states": [{}, {}], "across": {0: 2}},
            r"must give proportions, .*across=0",
        ),
        ({"groups": [[*"a"], [*"b"]], "states": [{}, {}], "across": {0: (1,)}}, "as many positive proportions"),
        (
            {"groups": [[*"a"], [*"b"]], "states": [{}, {}], "across": {0: (1, 1), 1: (1, 1)}},
            "must name one dimension",
        ),
        (
            {"groups": [[*"ab"], [*"c"]], "states": [{"sum": 2}, {}], "across": "same"},
            r"groups that are the same have sums of \[2, 1\] terms",
        ),
    ],
)
def test_an_annotation_without_a_meaning_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        Annotation(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (
            Annotation(groups=[[*"ab"]], states=[{2: 2}]),
            "q: it has 2 dimensions, and the annotation splits dimension 2",
        ),
        (
            Annotation(groups=[[*"abcd"]], states=[{1: 4}]),
            "q: dimension 1 has 3 elements there, too few for 4 parts",
        ),
        (
            Annotation(groups=[[*"ab"]], states=[{"tp": 2}]),
            "q: 'tp' is the dimension that a parameter's rule cuts",
        ),
    ],
)
def test_a_tensor_that_cannot_be_laid_out_so_is_named(annotation: Annotation, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        layout_of(annotation, "q", (8, 3), "float32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": "gradient"}, "type 'gradient' is neither"),
        ({"dup": [2]}, "2 groups need as many entries"),
        ({"dup": [3, 2]}, "does not count its 2 groups"),
        ({"split": None}, "HSPMD's annotation: AttributeError"),
    ],
)
def test_an_entry_of_hspmd_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        Annotation.from_hspmd(DENSE | change)


@pytest.mark.parametrize(
    "annotation",
    [
        Annotation(groups=[("n0/0", "n0/1")], states=[{0: (2, 1)}]),
        Annotation(groups=[("n0/0", "n0/1")], states=[{"sum": 2}]),
        Annotation(groups=[("n0/0",), ("n0/1",)], states=[{}, {}], across="sum"),
        Annotation(groups=[("n0/0",), ("n0/1",)], states=[{}, {}], across=1),
    ],
)
def test_what_hspmd_has_no_word_for_is_not_written(annotation: Annotation) -> None:
    with pytest.raises(Invalid, match="HSPMD's files cannot say"):
        annotation.to_hspmd()
