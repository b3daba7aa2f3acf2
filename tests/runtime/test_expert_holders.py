"""Rows of experts on several devices are divided in the parts that the plan says."""

import pytest
import torch

from elasticd.runtime.parallel.expert_holders import ExpertHolders

HELD = ((0, 2), (1, 2), (2,))


def test_each_pair_has_one_device_that_has_its_expert() -> None:
    holders = ExpertHolders(HELD, ((2, 1, 2, 5),), 4)
    index = torch.randint(-1, 5, (500, 2))
    places = holders.of(index)
    for expert, place in zip(index.flatten().tolist(), places.flatten().tolist(), strict=True):
        assert place == -1 if expert not in (0, 1, 2) else expert in HELD[place]


@pytest.mark.parametrize(
    ("splits", "parts"), [((), (1, 1, 1)), (((2, 1, 2, 5),), (1, 2, 5)), (((2, 0, 1, 0),), (0, 1, 0))]
)
@pytest.mark.parametrize("first", [0, 7, 40_000])
def test_rows_are_divided_in_the_parts_of_the_plan_over_any_run(
    splits: tuple[tuple[int, ...], ...], parts: tuple[int, ...], first: int
) -> None:
    places = ExpertHolders(HELD, splits, 3).of(torch.full((first + 1000, 1), 2))[first:, 0]
    for place, part in enumerate(parts):
        assert abs(int((places == place).sum()) - 1000 * part / sum(parts)) <= 4
