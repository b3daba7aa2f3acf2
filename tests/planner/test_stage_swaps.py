"""Orders and layers improved under the schedule's time."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest
from elasticd_planner.cost.pipeline_time import Schedule
from elasticd_planner.search.balance.stage_swaps import Placed, StageCosts, improved

from tests.planner.brute import compositions

TIMING = Schedule()


def drawn(seed: int, stages: int) -> tuple[StageCosts, int]:
    """Groups of any cost, one boundary in three slow; and layers that fit in any order."""
    rng = random.Random(seed)
    layers = 2 * stages + rng.randint(0, 3)
    board = StageCosts(
        block=np.array([rng.uniform(0.5, 3.0) for _ in range(stages)]),
        embed=np.full(stages, 0.3),
        head=np.array([rng.choice([0.0, 1.0]) for _ in range(stages)]),
        forward=np.full(stages, 1 / 3),
        hop=np.array([[rng.choice([0.0, 0.1, 1.0]) for _ in range(stages)] for _ in range(stages)]),
        most=np.array([[rng.choice([3, layers]) for _ in range(stages)] for _ in range(stages)]),
    )
    return board, layers


def guesses(board: StageCosts, layers: int) -> list[Placed]:
    stages = len(board.block)
    found = []
    for order in permutations(range(stages)):
        for split in compositions(layers, stages):
            if board.fits(np.array(order), np.array(split)):
                found.append(Placed(order=order, layers=split))
    return found


def seconds(board: StageCosts, placed: Placed, micro_batches: int) -> float:
    return float(TIMING.seconds(board.times(np.array(placed.order), np.array(placed.layers)), micro_batches))


@pytest.mark.parametrize("seed", range(12))
def test_what_comes_out_is_close_to_the_best_of_all_and_has_room(seed: int) -> None:
    board, layers = drawn(seed, 3 + seed % 2)
    every = guesses(board, layers)
    first = every[seed % len(every)]
    found = improved(board, [first], 6, TIMING, swap=True)
    assert board.fits(np.array(found.order), np.array(found.layers))
    assert sorted(found.order) == list(range(len(board.block)))
    assert sum(found.layers) == layers
    best = min(seconds(board, one, 6) for one in every)
    assert best * (1 - 1e-9) <= seconds(board, found, 6) <= best * 1.12


@pytest.mark.parametrize("seed", range(12))
def test_without_swaps_the_order_stays_and_nothing_gets_slower(seed: int) -> None:
    board, layers = drawn(seed, 4)
    every = guesses(board, layers)
    first = every[seed % len(every)]
    found = improved(board, [first], 6, TIMING, swap=False)
    assert found.order == first.order
    assert seconds(board, found, 6) <= seconds(board, first, 6)


def test_the_best_guess_counts() -> None:
    board, layers = drawn(1, 3)
    every = sorted(guesses(board, layers), key=lambda one: seconds(board, one, 6))
    assert seconds(board, improved(board, every, 6, TIMING, swap=True), 6) == seconds(board, every[0], 6)


def test_one_stage_has_no_neighbours() -> None:
    board, _ = drawn(2, 1)
    alone = Placed(order=(0,), layers=(2,))
    assert improved(board, [alone], 4, TIMING, swap=True) == alone
