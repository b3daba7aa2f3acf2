"""The planners that batches are compared with: exact where their papers are, and right on steps done by
hand."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd.simulator.devices import packed_rows as played
from elasticd.simulator.results import packed_baselines as baselines
from elasticd.simulator.scenarios import corpus
from tests.sizes import examples


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Times of groups at 1 to 5 ranks, falling or not, the ranks that each needs, and a budget that holds
    them."""
    count = draw(st.integers(1, 4))
    times = [draw(st.lists(st.integers(1, 20), min_size=5, max_size=5)) for _ in range(count)]
    least = [draw(st.integers(1, 3)) for _ in range(count)]
    return times, least, draw(st.integers(sum(least), 12))


@settings(max_examples=examples(200))
@given(groups())
def test_degrees_are_those_of_the_least_longest_time(given: tuple[list[list[int]], list[int], int]) -> None:
    """Against all degrees within the budget."""
    times, least, ranks = given
    chosen = baselines.degrees([np.array(each) for each in times], least, ranks, range(1, 6))
    assert sum(chosen) <= ranks
    assert all(degree >= need for degree, need in zip(chosen, least, strict=True))

    def longest(found: tuple[int, ...]) -> int:
        return max(time[degree - 1] for time, degree in zip(times, found, strict=True))

    every = product(*(range(need, 6) for need in least))
    assert longest(tuple(chosen)) == min(longest(each) for each in every if sum(each) <= ranks)


def test_equal_sequences_on_equal_lanes_take_the_bound_under_every_planner() -> None:
    gang = played.normal(4, fixed=0, near=0.0, far=0.0)
    lengths = np.full(8, 3000)
    for planner in (baselines.dhp, baselines.flexsp, baselines.static_in_order, baselines.static_by_cost):
        assert planner(lengths, gang) == pytest.approx(played.bound(lengths, gang), rel=0.01)
    assert played.seconds(played.dealt(lengths, gang), gang) == pytest.approx(
        played.bound(lengths, gang), rel=0.01
    )


def test_the_exchange_shows_beyond_the_attention_that_hides_it() -> None:
    """One sequence on two lanes: each lacks keys of the other. Attention hides cheap links, and no dear
    ones."""
    lengths = np.array([8000])
    times = []
    for near in (0.0, 0.01, 1.0, 2.0):
        gang = played.normal(2, near=near, fixed=0, capacity=4096)
        times.append(played.seconds(played.dealt(lengths, gang), gang))
    assert times[0] == times[1] == 4000 * (gang.linear + 8000)
    # The lane with the earlier pairs lacks all but its own; the other lacks half of those.
    assert times[3] - times[2] == pytest.approx(4000 * gang.linear)


def test_a_wave_ends_with_its_slowest_group() -> None:
    gang = played.normal(2, fixed=0, capacity=8000)._replace(slowdown=(64, 128))
    one = 4000 * (gang.linear + 4000)
    assert baselines.dhp(np.array([4000, 4000]), gang) == pytest.approx(2 * one)
    assert baselines.without_stragglers(baselines.dhp)(np.array([4000, 4000]), gang) == pytest.approx(2 * one)


@pytest.mark.parametrize("name", corpus.CORPORA)
def test_a_corpus_draws_the_same_lengths_from_the_same_seed(name: str) -> None:
    first, again = (corpus.CORPORA[name](np.random.default_rng(1), 500) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert 1 <= first.min() <= first.max() <= corpus.LONGEST
