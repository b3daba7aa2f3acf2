"""Placements of experts against the bound, an enumeration of all placements, and drifting loads."""

from itertools import product

import numpy as np
import pytest
from elasticd_planner.placement.expert_placement import (
    TOLERANCE,
    arrivals,
    busiest,
    least_busiest,
    placed,
)
from elasticd_planner.spec.expert_load import rows_by_device
from elasticd_planner.value import Invalid
from hypothesis import given, settings
from hypothesis import strategies as st

loads = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=24)
slowdowns = st.lists(st.sampled_from([1.0, 1.25, 2.0, 4.0]), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(load=loads, slowdown=slowdowns)
def test_a_new_placement_meets_the_bound_with_one_replica_less_than_devices(
    load: list[float], slowdown: list[float]
) -> None:
    found = placed(load, slowdown)
    assert found.replicas <= len(slowdown) - 1
    assert sorted({expert for own in found.held for expert in own}) == [*range(len(load))]
    assert all(own == tuple(sorted(own)) for own in found.held)
    now = busiest(load, slowdown, found.held, found.splits)
    assert now == pytest.approx(found.busiest, rel=1e-3, abs=1e-9)
    assert now <= least_busiest(load, slowdown) * 1.001 + 1e-9
    assert sum(rows_by_device(load, found.held, found.splits)) == pytest.approx(sum(load), abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), slowdown=slowdowns)
def test_parts_of_rows_are_the_best_of_these_holders(data: st.DataObject, slowdown: list[float]) -> None:
    """For each set of devices: what can only go there, over their speed, is a bound, and the largest is met."""
    devices = len(slowdown)
    sets = st.sets(st.integers(0, devices - 1), min_size=1, max_size=devices)
    holders = data.draw(st.lists(sets, min_size=1, max_size=8))
    load = data.draw(st.lists(st.floats(0.1, 10.0), min_size=len(holders), max_size=len(holders)))
    held = tuple(tuple(e for e, on in enumerate(holders) if d in on) for d in range(devices))
    bound = 0.0
    for chosen in product([False, True], repeat=devices):
        inside = {d for d in range(devices) if chosen[d]}
        if inside:
            rows = sum(load[e] for e, on in enumerate(holders) if on <= inside)
            bound = max(bound, rows / sum(1 / slowdown[d] for d in inside))
    found = placed(load, slowdown, held, replicas=0, tolerance=1e9)  # nothing moves
    assert found.held == held
    assert found.busiest == pytest.approx(bound, rel=1e-6)
    assert busiest(load, slowdown, found.held, found.splits) == pytest.approx(bound, rel=1e-3)


def test_without_replicas_a_placement_is_near_to_the_best_of_all() -> None:
    rng = np.random.default_rng(5)
    over = []
    for _ in range(30):
        load = rng.gamma(1.0, size=6).tolist()
        slowdown = rng.choice([1.0, 2.0], size=3).tolist()
        best = min(
            max(
                x * sum(w for w, d in zip(load, on, strict=True) if d == place)
                for place, x in enumerate(slowdown)
            )
            for on in product(range(3), repeat=6)
        )
        found = placed(load, slowdown, replicas=0)
        assert found.replicas == 0
        over.append(found.busiest / best)
    assert max(over) < 4 / 3  # longest first, on devices of unlike speed (Graham 1969: alike ones)
    assert np.mean(over) < 1.03


def test_memory_for_few_experts_is_respected() -> None:
    load = [50.0, 30.0, *[1.0] * 6]
    found = placed(load, [1.0, 1.0, 1.0], slots=[3, 3, 2])
    assert [len(own) for own in found.held] <= [3, 3, 2]
    assert {expert for own in found.held for expert in own} == {*range(8)}
    roomy = placed(load, [1.0, 1.0, 1.0], slots=[4, 4, 4])
    assert max(map(len, roomy.held)) <= 4
    assert roomy.busiest < found.busiest
    again = placed([4.0, 3.0, 2.0, 1.0], [1.0, 1.0], ((0, 3), (1, 2)), slots=[1, 3])
    assert [len(own) for own in again.held] <= [1, 3]
    whole = placed([4.0, 3.0, 2.0, 1.0], [1.0, 1.0], ((0, 3), (1,)))
    assert {expert for own in whole.held for expert in own} == {*range(4)}
    with pytest.raises(Invalid, match="4 experts, and memory for 3 on all devices together"):
        placed([4.0, 3.0, 2.0, 1.0], [1.0, 1.0], slots=[1, 2])
    with pytest.raises(Invalid, match="held is of 1 devices, and there are 2"):
        placed([4.0, 3.0, 2.0, 1.0], [1.0, 1.0], ((0, 1, 2, 3),))


def test_where_memory_is_full_experts_change_places() -> None:
    rng = np.random.default_rng(3)
    even = tuple(tuple(range(8 * device, 8 * device + 8)) for device in range(8))
    load = (1 / np.arange(1, 65) ** 0.5)[rng.permutation(64)].tolist()
    before = busiest(load, [1.0] * 8, even) / least_busiest(load, [1.0] * 8)
    found = placed(load, [1.0] * 8, even, slots=[8] * 8, replicas=7)
    after = found.busiest / least_busiest(load, [1.0] * 8)
    assert before > 1.2
    assert after < 1.06
    assert [len(own) for own in found.held] == [8] * 8
    assert {expert for own in found.held for expert in own} == {*range(64)}
    assert arrivals(even, found.held) <= 24
    assert placed(load, [1.0] * 8, found.held, slots=[8] * 8, replicas=7).held == found.held


@pytest.mark.parametrize("load", [[0.0] * 8, [1.0, *[0.0] * 7], [0.0, *[1.0] * 7], [1e-300] * 8, [1e300] * 8])
def test_loads_of_hostile_routers_are_placed(load: list[float]) -> None:
    """No row at all, all rows to one expert, an expert that no row chooses, sums at the ends of doubles."""
    for slots in ((), [2] * 4):
        for held in ((), ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3, 4, 5, 6, 7), (), (), ())):
            found = placed(load, [1.0, 2.0, 1.0, 1.0], held, slots=slots)
            assert {expert for own in found.held for expert in own} == {*range(8)}
            assert all(len(own) <= most for own, most in zip(found.held, slots, strict=False))
            assert all(sum(split[1:]) > 0 for split in found.splits)


def test_a_drifted_load_is_divided_anew_before_an_expert_moves() -> None:
    load = [12.0, 5.0, 5.0, 4.0, 3.0, 3.0]
    before = placed(load, [1.0, 1.0, 1.0])
    drifted = [12.5, 4.8, 5.2, 4.0, 2.9, 3.1]
    after = placed(drifted, [1.0, 1.0, 1.0], before.held)
    assert after.held == before.held
    assert after.splits != before.splits
    assert after.busiest <= least_busiest(drifted, [1.0] * 3) * (1 + TOLERANCE)


def test_replicas_follow_the_experts_whose_parts_are_largest() -> None:
    """Also where the load is even without them: the next one is another."""
    even = ((0, 4), (1, 5), (2, 6), (3, 7))
    held = placed([6.0, 4.0, 4.0, 4.0, 1.0, 3.0, 3.0, 3.0], [1.0] * 4, even).held
    assert [sum(expert in own for own in held) for expert in range(8)] == [2, 2, 2, 1, 1, 1, 1, 1]
    drifted = [4.0, 4.0, 4.0, 4.0, 1.0, 8.0, 3.0, 3.0]
    after = placed(drifted, [1.0] * 4, held)
    assert sum(5 in own for own in after.held) >= 2
    assert arrivals(held, after.held) <= 3
    assert after.busiest <= least_busiest(drifted, [1.0] * 4) * (1 + TOLERANCE)


def test_without_memory_for_one_no_replica_is_made() -> None:
    even = ((0, 1), (2, 3))
    assert placed([4.0, 1.0, 3.0, 2.0], [1.0, 1.0], even, slots=[2, 2]).held == even


def test_a_slow_device_gets_fewer_rows_and_few_experts_move() -> None:
    rng = np.random.default_rng(0)
    load = (1 / np.arange(1, 65) ** 0.9)[rng.permutation(64)].tolist()
    before = placed(load, [1.0] * 8)
    slow = [1.0, 3.0, *[1.0] * 6]
    after = placed(load, slow, before.held)
    assert after.busiest <= least_busiest(load, slow) * 1.02
    assert arrivals(before.held, after.held) <= 12
    assert rows_by_device(load, after.held, after.splits)[1] < sum(load) / 8 / 2
