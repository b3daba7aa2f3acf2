"""The rows of a first item, and how many a dataset says of it."""

from __future__ import annotations

import pytest

from elasticd.runtime.engine.item_rows import FirstItem


@pytest.mark.parametrize(
    ("rows", "listed", "ratio"),
    [
        (1024, 256, 4.0),
        (256, 1024, 0.25),
        (1500, 1000, 1.5),
        (577, 576, 1.0),  # a token of the whole image
        (260, 64, 4.0),  # a size that is drawn as the item is read
        (10, 1000, 0.01),
        (0, 64, 1.0),
        (64, 0, 1.0),
    ],
)
def test_rows_for_each_that_the_dataset_says_are_a_fraction_of_small_numbers(
    rows: int, listed: int, ratio: float
) -> None:
    assert FirstItem(rows=rows, listed=listed).near_ratio == ratio
