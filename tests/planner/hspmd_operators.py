"""HSPMD's communication, case by case: what its paper publishes (Fig. 7 to 10), and what it cannot do.

Of the bottom tier both annotations have the same relation across groups, of the top tier the same states. The
combined case needs both, the bottom tier first.
"""

from __future__ import annotations

from typing import NamedTuple

from elasticd_planner.layout.annotations import Annotation
from elasticd_planner.spec.box import TensorLayout

#: Divides into 2, 3 and 4 parts.
SHAPE = (24, 24)
TWO, OTHER_TWO = ("n0/0", "n0/1"), ("n1/0", "n1/1")
THREE = ("n0/0", "n0/1", "n0/2")
FOUR = ("n0/0", "n0/1", "n0/2", "n0/3")
#: Unlike groups: TP 4, TP 2 and TP 1.
UNLIKE = (FOUR, ("n1/0", "n1/1"), ("n1/2",))


class Case(NamedTuple):
    """Two annotations, and the operators that the paper has between them."""

    name: str
    source: Annotation
    target: Annotation
    operators: tuple[str, ...] = ()

    def layouts(self) -> tuple[TensorLayout, TensorLayout]:
        """Of a tensor of `SHAPE`."""
        return self.source.layout(SHAPE), self.target.layout(SHAPE)


def one(group: tuple[str, ...], **state: int) -> Annotation:
    """One group; `d0` stands for dimension 0."""
    return Annotation(groups=[group], states=[{int(k[1:]) if k[0] == "d" else k: n for k, n in state.items()}])  # type: ignore[misc]


COLUMNS = Annotation(groups=UNLIKE, states=[{1: 4}, {1: 2}, {}])
TERMS = Annotation(groups=[FOUR, OTHER_TWO], states=[{"sum": 4}, {"sum": 2}], across="sum")

PUBLISHED = (
    Case("identity", one(TWO, d0=2), one(TWO, d0=2)),
    Case("send and receive", one(TWO, d0=2), one(OTHER_TWO, d0=2), ("SR",)),
    Case("all-reduce", one(TWO, sum=2), one(TWO, same=2), ("AR",)),
    Case("reduce-scatter", one(TWO, sum=2), one(TWO, d0=2), ("RS",)),
    Case("all-gather", one(TWO, d0=2), one(TWO, same=2), ("AG",)),
    Case("batched send and receive", one(FOUR, d0=4), one(OTHER_TWO, d1=2), ("BSR",)),
    Case("split all-reduce", COLUMNS.replace(across="sum"), COLUMNS, ("SplitAR",)),
    Case("split reduce-scatter", COLUMNS.replace(across="sum"), COLUMNS.replace(across=0), ("SplitRS",)),
    Case("split all-gather", COLUMNS.replace(across=0), COLUMNS, ("SplitAG",)),
    Case(
        "bottom tier, then top tier",
        TERMS,
        Annotation(groups=[FOUR, OTHER_TWO], states=[{0: 4}, {0: 2}], across="same"),
        ("RS", "SplitAR"),
    ),
)

BEYOND = (
    Case(
        "tp 3 beside tp 2: slices that do not divide", one(("n0/0", "n0/1", "n0/2"), d0=3), one(OTHER_TWO, d0=2)
    ),
    Case(
        "gradients of tp 3 beside tp 2",
        Annotation(groups=[THREE, OTHER_TWO], states=[{0: 3}, {0: 2}], across="sum"),
        Annotation(groups=[THREE, OTHER_TWO], states=[{0: 3}, {0: 2}], across="same"),
    ),
    Case("terms to other devices", one(TWO, sum=2), one(OTHER_TWO, d0=2)),
    Case("terms to other devices, whole", one(TWO, sum=2), one(OTHER_TWO, same=2)),
    Case("another number of groups, with terms", TERMS, one(UNLIKE[1], d0=2)),
    Case("terms of another number of terms", one(FOUR, sum=4), one(FOUR, sum=2, d0=2)),
    Case("a value as terms", one(TWO, same=2), one(TWO, sum=2)),
    Case(
        "terms inside groups whose relation changes to parts",
        TERMS,
        Annotation(groups=[FOUR, OTHER_TWO], states=[{1: 4}, {1: 2}], across=0),
    ),
    Case(
        "terms inside groups that split a dimension",
        Annotation(groups=[FOUR, OTHER_TWO], states=[{"sum": 4}, {"sum": 2}], across=0),
        Annotation(groups=[FOUR, OTHER_TWO], states=[{1: 4}, {1: 2}], across="same"),
    ),
    Case("groups with other parts", COLUMNS.replace(across=0), COLUMNS.replace(across={0: (1, 2, 3)})),
    Case("splits along two dimensions", one(FOUR, d0=2, d1=2), one(FOUR, d1=4)),
    Case(
        "uneven parts",
        Annotation(groups=[TWO], states=[{0: (5, 1)}]),
        Annotation(groups=[TWO], states=[{0: (1, 3)}]),
    ),
)
