"""Layers and micro-batches against enumeration."""

from itertools import product

import numpy as np
import pytest
from elasticd_planner.search.balance.layer_split import Terms, curve, split_layers
from elasticd_planner.search.balance.micro_batch_split import capacity, split_micro_batches
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.brute import compositions
from tests.sizes import examples


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[Terms], int]:
    depth = draw(st.integers(1, 4))
    terms = []
    for _ in range(depth):
        most = sorted((draw(st.integers(0, 7)) for _ in range(depth)), reverse=True)
        terms.append(
            Terms(
                block=draw(st.sampled_from([0.5, 1.0, 1.7, 3.0])),
                fixed=draw(st.sampled_from([0.0, 0.3, 2.0])),
                most=tuple(most),
            )
        )
    return terms, draw(st.integers(1, 8))


def time_of(terms: list[Terms], layers: tuple[int, ...], micro_batches: int) -> float:
    depth = len(terms)
    if any(n > t.most[min(micro_batches, depth) - 1] for n, t in zip(layers, terms, strict=True)):
        return np.inf
    stages = [t.block * n + t.fixed for n, t in zip(layers, terms, strict=True)]
    return (micro_batches - 1) * max(stages) + sum(stages)


@settings(max_examples=examples(80))
@given(pipelines())
def test_layers_are_the_best_of_all_compositions(case: tuple[list[Terms], int]) -> None:
    terms, layers = case
    found = curve(terms, layers, 6)
    for micro_batches in range(1, 7):
        options = list(compositions(layers, len(terms))) if layers >= len(terms) else []
        best = min((time_of(terms, option, micro_batches) for option in options), default=np.inf)
        assert found[micro_batches - 1] == pytest.approx(best)
        if np.isfinite(best):
            split = split_layers(terms, layers, micro_batches)
            assert sum(split) == layers
            assert time_of(terms, split, micro_batches) == pytest.approx(best)


def test_layers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 layers do not fit"):
        split_layers([Terms(block=1, fixed=0, most=(2,))], 3, 1)


CURVES = st.lists(
    st.lists(st.integers(1, 9), min_size=8, max_size=8).map(lambda steps: np.cumsum(steps).astype(float)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=examples(80))
@given(CURVES, st.integers(1, 8))
def test_micro_batches_are_the_best_of_all_splits(curves: list[np.ndarray], total: int) -> None:
    given_out = split_micro_batches(curves, total)
    options = [m for m in product(range(1, total + 1), repeat=len(curves)) if sum(m) == total]
    if not options:
        assert given_out is None
        return
    assert given_out is not None
    assert sum(given_out) == total
    assert min(given_out) >= 1

    def slowest(split: tuple[int, ...]) -> float:
        return max(float(c[m - 1]) for c, m in zip(curves, split, strict=True))

    assert slowest(given_out) == min(map(slowest, options))


def test_micro_batches_that_no_pipeline_can_take_are_none() -> None:
    assert split_micro_batches([np.array([1.0, np.inf])], 2) is None


def test_capacity_counts_what_ends_within_the_limit() -> None:
    seconds = np.array([1.0, 2.0, 3.0, np.inf])
    assert [capacity(seconds, limit) for limit in (0.5, 1.0, 2.9999999999, 3.5)] == [0, 1, 3, 3]
