"""The fold: shares of pairs are shares of tokens, of attention and of work."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from elasticd_planner.batching import fold
from elasticd_planner.spec.batch import SequencePiece
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sizes import examples


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A length, and the weights of as many members as it has pairs at most."""
    weights = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=8))
    return draw(st.integers(2 * len(weights) - 1, 3000)), weights


@settings(max_examples=examples(400))
@given(cuts())
def test_shares_follow_each_other_and_are_all_pairs(given: tuple[int, list[int]]) -> None:
    length, weights = given
    found = fold.shared(length, weights)
    assert len(found) == len(weights)
    assert found[0][0] == 0
    assert found[-1][1] == fold.pair_count(length)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(start < stop for start, stop in found)


@settings(max_examples=examples(400))
@given(cuts())
def test_a_share_is_within_a_pair_of_its_weight(given: tuple[int, list[int]]) -> None:
    length, weights = given
    exact = [Fraction(fold.pair_count(length) * weight, sum(weights)) for weight in weights]
    if min(exact) < 1:
        return
    for part, (start, stop) in zip(exact, fold.shared(length, weights), strict=True):
        assert abs(stop - start - part) <= 1


@settings(max_examples=examples(200))
@given(cuts())
def test_a_share_of_the_pairs_is_that_share_of_keys_and_of_tokens(given: tuple[int, list[int]]) -> None:
    """Keys counted token by token under a causal mask; the middle of an odd length is half a pair."""
    length, weights = given
    for start, stop in fold.shared(length, weights):
        piece = SequencePiece(0, length, start, stop)
        own = [token for a, b in piece.spans for token in range(a, b)]
        assert len(own) == piece.tokens
        assert 2 * sum(token + 1 for token in own) == len(own) * (length + 1)


def test_token_counts_are_those_of_pieces() -> None:
    pieces = [
        SequencePiece(0, length, start, stop)
        for length in range(1, 12)
        for start in range(fold.pair_count(length) + 1)
        for stop in range(start, fold.pair_count(length) + 1)
    ]
    lengths, starts, stops = np.array([(p.length, p.start, p.stop) for p in pieces]).T
    assert fold.token_counts(lengths, starts, stops).tolist() == [p.tokens for p in pieces]


def test_the_cost_of_shares_is_the_cost_of_the_whole() -> None:
    assert sum(fold.cost(tokens, 90, 7) for tokens in (40, 30, 20)) == 90 * (7 + 90)


@settings(max_examples=examples(300))
@given(cuts(), st.data())
def test_no_member_has_more_tokens_than_it_holds(given: tuple[int, list[int]], data: st.DataObject) -> None:
    length, weights = given
    most = [data.draw(st.integers(2, 2 * length)) for _ in weights]
    if sum(fold.held_pairs(length, most)) < fold.pair_count(length):
        with pytest.raises(Invalid, match="does not fit lanes"):
            fold.shared(length, weights, most)
        return
    found = fold.shared(length, weights, most)
    assert found[-1][1] == fold.pair_count(length)
    for (start, stop), limit in zip(found, most, strict=True):
        assert 0 < SequencePiece(0, length, start, stop).tokens <= limit


def test_more_lanes_than_pairs_are_refused() -> None:
    with pytest.raises(Invalid, match="a sequence of 4 tokens has 2 pairs of tokens: 3 lanes need one each"):
        fold.shared(4, (1, 1, 1))


def test_a_member_with_less_than_a_pair_gets_one() -> None:
    assert fold.shared(20, (1, 1000, 1)) == ((0, 1), (1, 9), (9, 10))
