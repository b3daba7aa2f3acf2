"""Rows of experts on several devices are divided in the parts that the plan says."""

import random

import pytest
import torch
from elasticd_planner.placement.expert_placement import placed

from elasticd.runtime.parallel.expert_holders import ExpertHolders
from elasticd.runtime.parallel.held_experts import OwnExperts

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


@pytest.mark.parametrize("seed", range(6))
def test_each_pair_of_a_pass_is_on_one_device_and_devices_are_even(seed: int) -> None:
    """Divided by the counts of the pass, whatever the plan said."""
    drawn = random.Random(seed)
    devices, count = drawn.choice([2, 3, 8]), drawn.choice([3, 16, 64])
    slowdowns = [drawn.choice([64, 96, 128]) for _ in range(devices)]
    on = [drawn.sample(range(devices), drawn.choice([1, 2, devices])) for _ in range(count)]
    held = tuple(tuple(e for e in range(count) if place in on[e]) for place in range(devices))
    holders = ExpertHolders(held, (), count, slowdowns)
    index = torch.tensor([[drawn.randint(-1, count) for _ in range(3)] for _ in range(200)])
    taken = torch.full(index.shape, -1)
    for place in range(devices):
        row, slot, local = OwnExperts(holders, place).pairs(index)
        assert (taken[row, slot] == -1).all()
        taken[row, slot] = place
        assert [held[place][number] for number in local.tolist()] == index[row, slot].tolist()
    assert ((taken == -1) == ((index < 0) | (index == count))).all()
    rows = [float((index == expert).sum()) for expert in range(count)]
    best = placed(rows, [each / 64 for each in slowdowns], held, replicas=0, tolerance=1e9).busiest
    busiest = max(int((taken == place).sum()) * slowdowns[place] / 64 for place in range(devices))
    assert busiest <= 1.01 * best + 2 * sum(len(each) > 1 for each in on)
