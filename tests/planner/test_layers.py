"""Layers under the schedule's exact time, against enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from elasticd_planner.cost.pipeline_time import Schedule, Times
from elasticd_planner.search.balance import layer_split as under_test
from elasticd_planner.search.balance.layer_split import Terms, best_layers, bounded, curve, reached
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.brute import compositions
from tests.sizes import examples

COSTS = st.tuples(st.floats(0.3, 5.0), st.sampled_from([0.0, 0.7, 2.0]), st.sampled_from([0.0, 0.5, 3.0]))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[Terms]], int, int]:
    """Pipelines with as many stages, layers, micro-batches."""
    depth = draw(st.integers(1, 4))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        terms = []
        for stage in range(depth):
            block, fixed, hop = draw(COSTS)
            most = tuple(sorted((draw(st.integers(0, 9)) for _ in range(depth)), reverse=True))
            hop = hop if stage < depth - 1 else 0.0
            terms.append(Terms(block=block, fixed=fixed, most=most, hop=hop, forward=draw(st.floats(0.2, 0.5))))
        made.append(terms)
    return made, draw(st.integers(depth, 9)), draw(st.integers(1, 12))


def seconds(terms: list[Terms], layers: tuple[int, ...], micro_batches: int) -> float:
    if any(n > t.most[min(micro_batches, len(terms)) - 1] for n, t in zip(layers, terms, strict=True)):
        return math.inf
    work = np.array([t.block * n + t.fixed for n, t in zip(layers, terms, strict=True)])
    forward = work * [t.forward for t in terms]
    hops = np.array([t.hop / 2 for t in terms[:-1]])
    times = Times(forward=forward, backward=work - forward, boundary=hops)
    return float(Schedule().seconds(times, micro_batches))


def least(terms: list[Terms], layers: int, micro_batches: int) -> float:
    return min(seconds(terms, option, micro_batches) for option in compositions(layers, len(terms)))


@settings(max_examples=examples(80))
@given(problems(), st.sampled_from([0.9, 1.0, 1.3, math.inf]))
def test_the_best_of_all_layers_within_the_limit(
    case: tuple[list[list[Terms]], int, int], slack: float
) -> None:
    pipelines, layers, micro_batches = case
    best = [least(terms, layers, micro_batches) for terms in pipelines]
    limit = min(best) * slack if math.isfinite(min(best)) else slack
    found = best_layers(pipelines, layers, micro_batches, limit, Schedule(hidden=0.5))
    for terms, one, expected in zip(pipelines, found, best, strict=True):
        if expected > limit * (1 + 1e-9) or math.isinf(expected):
            assert one is None
        else:
            assert one is not None
            assert one.seconds == pytest.approx(expected)
            assert sum(one.layers) == layers
            assert seconds(terms, one.layers, micro_batches) == pytest.approx(expected)


@settings(max_examples=examples(60))
@given(problems())
def test_what_is_least_and_what_is_reached_are_bounds(case: tuple[list[list[Terms]], int, int]) -> None:
    pipelines, layers, most = case
    for terms in pipelines:
        above = reached(terms, layers, most, Schedule())
        below = curve(terms, layers, most, Schedule(hidden=0.5))
        for m in range(1, most + 1):
            exact = least(terms, layers, m)
            assert below[m - 1] <= exact * (1 + 1e-9)
            assert exact <= above[m - 1] * (1 + 1e-9)


@settings(max_examples=examples(40))
@given(problems())
def test_many_ways_are_approached_from_the_formulas_layers(case: tuple[list[list[Terms]], int, int]) -> None:
    pipelines, layers, micro_batches = case
    listed = under_test.LISTED
    under_test.LISTED = 0
    try:
        found = best_layers(pipelines, layers, micro_batches, math.inf, Schedule(hidden=0.5))
    finally:
        under_test.LISTED = listed
    for terms, one in zip(pipelines, found, strict=True):
        exact = least(terms, layers, micro_batches)
        assert (one is None) == math.isinf(exact)
        if one is not None:
            assert exact * (1 - 1e-9) <= one.seconds
            near = [
                tuple(n + (k == i) - (k == j) for k, n in enumerate(one.layers))
                for i in range(len(terms))
                for j in range(len(terms))
                if one.layers[j] > 1 and i != j
            ]
            assert all(seconds(terms, n, micro_batches) >= one.seconds * (1 - 1e-8) for n in near)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 12))
def test_bounded_ways_are_all_there_are(caps: list[int], total: int) -> None:
    found = sorted(map(tuple, bounded(np.array(caps), total).tolist()))
    options = compositions(total, len(caps)) if total >= len(caps) else iter(())
    assert found == sorted(n for n in options if all(a <= b for a, b in zip(n, caps, strict=True)))
