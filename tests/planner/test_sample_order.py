"""The order of samples in an epoch: each once, well mixed, and of a large dataset without a permutation."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.sample_order import MOST_PERMUTED, order_for, samples_at
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(-(2**63), 2**63 - 1), st.data())
def test_each_place_of_an_epoch_has_a_sample_of_its_own(
    size: int, epoch: int, seed: int, data: st.DataObject
) -> None:
    whole = samples_at("feistel", seed, epoch, size, 0, size)
    assert np.array_equal(np.sort(whole), np.arange(size))
    first = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(first, size))
    assert np.array_equal(samples_at("feistel", seed, epoch, size, first, stop), whole[first:stop])


@pytest.mark.parametrize("size", [9973, 4096, 4097])
def test_an_order_is_as_mixed_as_a_permutation(size: int) -> None:
    """Displacements, neighbours and ascents are those of random permutations, within five deviations."""
    for epoch in range(20):
        order = samples_at("feistel", 7, epoch, size, 0, size).astype(np.float64)
        places = np.arange(size)
        for other in (
            places,
            np.roll(order, 1),
            np.roll(order, 2),
            samples_at("feistel", 7, 99, size, 0, size),
        ):
            correlation = float(np.corrcoef(order, other)[0, 1])
            assert abs(correlation) < 5 / size**0.5
        ascents = sum(before < after for before, after in pairwise(order))
        assert abs(ascents - size / 2) < 5 * (size / 12) ** 0.5
        counts = np.histogram2d(places, order, bins=8)[0]
        assert abs(counts - size / 64).max() < 5 * (size / 64) ** 0.5
        assert (order == places).sum() < 10


def test_a_billion_samples_cost_no_permutation() -> None:
    sampler = Sampler(size=10**9, global_batch=512, seed=3, order=order_for(10**9))
    last = 10**9 // 512  # this step spans two epochs
    tracemalloc.start()
    try:
        drawn = [sampler.samples(step) for step in (0, 1, last, 10 * last)]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert all(len(set(each)) == 512 and min(each) >= 0 and max(each) < 10**9 for each in drawn)
    assert len(set().union(*drawn)) > 2040


def test_orders_do_not_change_from_release_to_release() -> None:
    """A resume goes on in the order that its checkpoint has."""
    assert order_for(MOST_PERMUTED) == "permutation"
    assert samples_at("permutation", 3, 1, 20, 0, 6).tolist() == PERMUTATION
    assert samples_at("feistel", 3, 1, 20, 0, 6).tolist() == FEISTEL
    assert samples_at("feistel", 3, 0, 10**9, 10**6, 10**6 + 2).tolist() == FAR


PERMUTATION = [1, 14, 8, 16, 0, 5]
FEISTEL = [5, 14, 4, 11, 7, 6]
FAR = [281272004, 262287545]
