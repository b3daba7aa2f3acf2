"""A group's members are lined up so that the fewest bytes move: held against all orders of those alike."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

import msgspec
import pytest
from elasticd_planner.cost.memory import memory_by_device
from elasticd_planner.cost.model import step_seconds
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.placement.state_movement import bytes_by_member, bytes_to_move, holders
from elasticd_planner.placement.tp_rank_order import relax_shares, reorder_tp_ranks
from elasticd_planner.problem import Problem
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.brute import compositions
from tests.planner.models import cluster, plan, profile
from tests.sizes import examples

UNITS, LAYERS = 24, 4
MODEL = profile(layers=LAYERS, share_units=UNITS)
COST = ProfileCost(MODEL)
CLUSTER = cluster(5, 5)
NAMES = [device.name for device in CLUSTER.devices]


def shares(rng: random.Random, width: int) -> list[int]:
    """Mostly of two values, UNITS together."""
    while True:
        values = [rng.randint(1, UNITS // 2) for _ in range(2)]
        found = [rng.choice(values) for _ in range(width - 1)]
        if sum(found) < UNITS:
            return [*found, UNITS - sum(found)]


def drawn(rng: random.Random, width: int) -> Plan:
    """Two stages on some of the devices."""
    cut, names = rng.randint(1, LAYERS - 1), rng.sample(NAMES, 2 * width)
    first = (cut, names[:width], shares(rng, width))
    return plan((2, [first, (LAYERS - cut, names[width:], shares(rng, width))]))


def on(made: Plan, pipelines: tuple[Pipeline, ...]) -> Plan:
    return made.replace(strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),))


def lined(made: Plan, current: Plan, rates: dict[str, float]) -> Plan:
    return on(made, reorder_tp_ranks(made.pipelines, problem(current, rates)))


def problem(current: Plan, rates: dict[str, float]) -> Problem:
    return Problem(cluster=CLUSTER, profile=MODEL, rates=rates, current=current, global_batch=2, micro_batch=1)


def orders(made: Plan, index: int, current: Plan, rates: dict[str, float]) -> list[Plan]:
    """The plan with one stage's members in all orders and with all shares of those alike, as far as members
    that held some of its layers stay in the order of that, and others in the order of their names."""
    pipeline = made.pipelines[0]
    stage, had = pipeline.stages[index], holders(current, UNITS)

    def old(name: str) -> bool:
        held = had.get(name)
        return held is not None and held.start < stage.stop and stage.start < held.stop

    found = []
    kinds = Counter((rates[name], share) for name, share in zip(stage.devices, stage.shares, strict=True))
    for names in permutations(stage.devices):
        kept, fresh = ([name for name in names if old(name) is here] for here in (True, False))
        if kept != sorted(kept, key=lambda name: (had[name].low, name)) or fresh != sorted(fresh):
            continue
        for units in set(permutations(stage.shares)):
            if Counter((rates[name], share) for name, share in zip(names, units, strict=True)) == kinds:
                stages = list(pipeline.stages)
                stages[index] = Stage(start=stage.start, stop=stage.stop, devices=names, shares=units)
                found.append(on(made, (msgspec.structs.replace(pipeline, stages=tuple(stages)),)))
    return found


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_no_order_of_members_and_shares_lacks_less(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.randint(2, 4)
    old, new = drawn(rng, width), drawn(rng, width)
    rates = {name: rng.choice([1.0, 1.0, 2.0]) for name in NAMES}
    made = lined(new, old, rates)
    least = bytes_to_move(MODEL, old, made)
    for index in range(2):
        for other in orders(new, index, old, rates):
            stage = other.pipelines[0].stages[index]
            theirs, ours = (
                sum(size for name, size in bytes_by_member(MODEL, old, each).items() if name in stage.devices)
                for each in (other, made)
            )
            assert ours <= theirs + 1e-6
    assert lined(made, old, rates) == made, "it is the best already"
    assert least <= bytes_to_move(MODEL, old, new)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_seconds_and_memory_stay_what_they_are(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.randint(2, 5)
    old, new = drawn(rng, width), drawn(rng, width)
    rates = {name: rng.choice([1.0, 1.0, 2.0]) for name in NAMES}
    made = lined(new, old, rates)
    assert step_seconds(made, CLUSTER, rates, COST) == pytest.approx(step_seconds(new, CLUSTER, rates, COST))
    assert sorted(memory_by_device(made, COST).values()) == sorted(memory_by_device(new, COST).values())
    assert set(made.members) == set(new.members)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_no_other_shares_that_keep_a_group_as_fast_lack_less(seed: int) -> None:
    rng = random.Random(seed)
    names = NAMES[: rng.randint(2, 4)]
    old, new = (plan((1, [(LAYERS, names, shares(rng, len(names)))])) for _ in range(2))
    rates = {name: rng.choice([1.0, 1.5, 2.57]) for name in NAMES}
    found = relax_shares(new.pipelines, problem(old, rates))

    def slowest(units: tuple[int, ...]) -> float:
        return max(rates[name] * share for name, share in zip(names, units, strict=True))

    (stage,), (line,) = new.pipelines[0].stages, new.pipelines
    assert slowest(found[0].stages[0].shares) <= slowest(stage.shares) * (1 + 1e-9)
    least = min(
        bytes_to_move(MODEL, old, on(new, (msgspec.structs.replace(line, stages=(other,)),)))
        for units in compositions(UNITS, len(names))
        if slowest(units) <= slowest(stage.shares) * (1 + 1e-9)
        for other in [msgspec.structs.replace(stage, shares=units)]
    )
    assert bytes_to_move(MODEL, old, on(new, found)) == least


def test_those_on_both_sides_take_what_a_slow_member_leaves() -> None:
    names = NAMES[:5]
    old = plan((1, [(LAYERS, names, [5, 5, 5, 5, 4])]))
    new = plan((1, [(LAYERS, names, [6, 6, 5, 2, 5])]))
    rates = dict.fromkeys(NAMES, 1.0) | {names[3]: 3.0}
    made = lined(new, old, rates)
    stage = made.pipelines[0].stages[0]
    assert (stage.devices, stage.shares[3]) == (tuple(names), 2)
    assert bytes_to_move(MODEL, old, made) < 0.8 * bytes_to_move(MODEL, old, new)


def test_who_stands_in_takes_the_place_of_the_one_that_left() -> None:
    old = plan((1, [(LAYERS, ["n0/0", "n0/1", "n0/2", "n0/3"], [6, 6, 6, 6])]))
    new = plan((1, [(LAYERS, ["n0/0", "n0/2", "n0/3", "n0/4"], [6, 6, 6, 6])]))
    made = lined(new, old, dict.fromkeys(NAMES, 1.0))
    assert made.pipelines[0].stages[0].devices == ("n0/0", "n0/4", "n0/2", "n0/3")
    lacks = bytes_by_member(MODEL, old, made)
    assert [name for name, size in lacks.items() if size] == ["n0/4"]
