"""Plans of models with experts: placed by load and slowdown, near to where they are, where memory allows."""

from typing import Any

import msgspec
import numpy as np
import pytest
from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.problem import Problem, SearchSpace
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.expert_load import ExpertLoad, fractions_in, held_by_device
from elasticd_planner.spec.plan import Plan

from tests.planner.models import cluster

LAYERS, EXPERTS = 4, 16
ROWS = (1000 / np.arange(1, EXPERTS + 1) ** 0.9).tolist()


def load_of(*, seed: int = 0, part: float = 0.8, expert_bytes: int = 1000) -> ExpertLoad:
    rng = np.random.default_rng(seed)
    rows = {block: tuple(np.array(ROWS)[rng.permutation(EXPERTS)].tolist()) for block in range(LAYERS)}
    return ExpertLoad(rows=rows, part=part, expert_bytes=expert_bytes)


def problem(devices: int = 4, memory: int = 10**9, **more: Any) -> Problem:
    profile = ModelProfile(
        name="mixture",
        layers=LAYERS,
        share_units=16,
        tokens=100.0,
        block=SectionProfile(seconds=1e-4, cut_bytes=EXPERTS * 1000, whole_bytes=1000),
    )
    return Problem(
        cluster=cluster(devices, memory=memory),
        profile=profile,
        global_batch=8,
        micro_batch=1,
        search_space=SearchSpace(fixed_tp=devices, fixed_dp=1),
        **more,
    )


def made(given: Problem) -> Plan:
    answer = plan(given)
    assert answer.plan is not None, answer.refusal
    return answer.plan


def unevenness(found: Plan, load: ExpertLoad, rates: dict[str, float]) -> float:
    """Of the worst block the busiest device over the bound."""
    worst = 0.0
    for _, _, lane in found.walk():
        slow = [rates.get(device, 1.0) for device in lane.devices]
        for fractions in fractions_in(lane, load):
            busiest = max(x * part for x, part in zip(slow, fractions, strict=True))
            worst = max(worst, busiest * sum(1 / x for x in slow))
    return worst


@pytest.mark.parametrize("rates", [{}, {"n0/1": 2.0}])
def test_experts_are_as_even_as_the_devices_are_fast(rates: dict[str, float]) -> None:
    load = load_of()
    even, found = made(problem(rates=rates)), made(problem(rates=rates, experts=load))
    assert unevenness(even, load, rates) > 1.2
    assert unevenness(found, load, rates) <= 1.02
    assert "experts placed by load" in found.reason
    assert found.prediction is not None
    assert even.prediction is not None
    assert found.prediction.step_seconds <= even.prediction.step_seconds * 1.02  # which counted them as even
    assert found.version == 4


def test_an_even_load_places_nothing() -> None:
    load = msgspec.structs.replace(load_of(), rows=dict.fromkeys(range(LAYERS), (100.0,) * EXPERTS))
    assert made(problem(experts=load)) == made(problem())


def test_the_running_plan_is_counted_under_the_load_and_few_experts_move() -> None:
    load = load_of()
    running = made(problem(experts=load))
    drifted = msgspec.structs.replace(
        load,
        rows=load.rows | {0: tuple(rows * (1.5 if e == 3 else 1.0) for e, rows in enumerate(load.rows[0]))},
    )
    answer = plan(problem(experts=drifted, current=running))
    assert answer.plan is not None
    assert answer.plan.prediction is not None
    assert answer.current_seconds is not None
    assert answer.plan.prediction.step_seconds < answer.current_seconds
    before, after = held_by_device(running, load), held_by_device(answer.plan, load)
    moved = sum(len({*after[d][b]} - {*before[d][b]}) for d in after for b in after[d])
    assert moved <= 4
    assert all(after[device][block] == before[device][block] for device in after for block in (1, 2, 3))
    assert plan(problem(experts=drifted, current=answer.plan)).plan is not None


def test_memory_limits_how_many_experts_a_device_has() -> None:
    load = load_of()
    roomy = made(problem(experts=load))
    assert roomy.prediction is not None
    most = max(roomy.prediction.memory.values())
    tight = problem(memory=int(most * 0.9), experts=load)
    found = made(tight)
    assert found.prediction is not None
    assert max(found.prediction.memory.values()) <= int(most * 0.9)
    assert 1.0 < unevenness(found, load, {}) < unevenness(made(problem()), load, {})
