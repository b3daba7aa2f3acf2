"""The bound: the planner's own, tighter than work over speed, and never exceeded by what is simulated."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.problem import Problem
from elasticd_planner.search.planner import plan as search
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.simulator.devices.device_model import DeviceModel
from elasticd.simulator.results.throughput_bound import Bounds
from elasticd.simulator.run import simulate
from elasticd.simulator.scenarios.scenario import Scenario, load, parse
from tests import sizes
from tests.simulation.checks import total
from tests.simulation.scenes import SMALL

WALK = load(Path(__file__).resolve().parents[2] / "examples" / "scenarios" / "walk-70b.toml")


def bounds(scenario: Scenario, overhead: float = 0.0) -> Bounds:
    model = scenario.model
    return Bounds(scenario.cluster.cluster(), model.global_batch, model.micro_batch, overhead)


def quiet(scenario: Scenario) -> DeviceModel:
    """Without noise: the bound holds for every step."""
    cluster, model = scenario.cluster.cluster(), scenario.model
    return DeviceModel(cluster, scenario.truth, model.tokens, seed=1, noise=0.0, overhead=0.0)


@pytest.mark.parametrize("slow", [{}, {"n0/0": 2.57}, {"n0/0": 2.57, "n1/0": 5.42, "n2/0": 12.53}])
def test_it_is_the_planners_own_and_tighter_than_work_over_speed(slow: dict[str, float]) -> None:
    truth, model = quiet(WALK), WALK.model
    problem = Problem(
        cluster=truth.cluster,
        profile=truth.profile,
        global_batch=model.global_batch,
        micro_batch=model.micro_batch,
        rates=slow,
    )
    found = bounds(WALK).seconds(slow, truth.profile)
    answer = search(problem)
    assert answer.plan is not None
    assert answer.plan.prediction is not None
    assert found == pytest.approx(answer.plan.prediction.bound_seconds)
    rates = [slow.get(name, 1.0) for name in truth.names]
    assert found > ProfileCost(truth.profile).bound(rates, model.global_batch) * 1.02


def test_dead_devices_do_not_help_and_the_fixed_part_of_a_step_counts() -> None:
    truth = quiet(WALK)
    healthy = bounds(WALK).seconds({}, truth.profile)
    node = {f"n0/{i}": math.inf for i in range(8)}
    assert bounds(WALK).seconds(node, truth.profile) == pytest.approx(healthy * 8 / 7, rel=0.05)
    assert bounds(WALK, 0.5).seconds({}, truth.profile) == pytest.approx(healthy + 0.5)
    assert math.isinf(bounds(WALK).seconds(dict.fromkeys(truth.names, math.inf), truth.profile))


def test_no_step_is_quicker_of_random_plans_of_the_planners_or_of_those_beside_them() -> None:
    """Any layers, stages, shares and micro-batches, on any speeds."""
    rng = np.random.default_rng(5)
    wide = SMALL.replace("nodes = 2", f"nodes = {sizes.number(full=3, quick=2)}")
    wide = wide.replace("devices = 2", "devices = 4")
    scenario = parse(wide.replace("736 MiB", "920 MiB"), "wide.toml")
    known, layers, batch = bounds(scenario), scenario.model.shapes.layers, scenario.model.global_batch
    nearest = math.inf
    for _ in range(sizes.number(full=12, quick=2)):
        truth = quiet(scenario)
        for name in truth.names:
            if rng.random() < 0.3:
                truth.slow([name], round(float(rng.uniform(1.2, 6)), 1))
        best, bound = _best(scenario, truth), known.seconds(truth.speeds, truth.profile)
        each = sizes.number(full=20, quick=10)
        beside = [_shifted(best, rng) for _ in range(each)]
        for made in (best, *beside, *(_random(rng, truth.names, layers, batch) for _ in range(each))):
            seconds = float(truth.step(made, 0).seconds)
            nearest = min(nearest, seconds / bound)
            assert seconds >= bound * (1 - 1e-9), made
    assert nearest < 1.4, "some come near"


def _best(scenario: Scenario, truth: DeviceModel) -> Plan:
    model = scenario.model
    problem = Problem(
        cluster=truth.cluster,
        profile=truth.profile,
        global_batch=model.global_batch,
        micro_batch=model.micro_batch,
        rates=truth.rates,
    )
    found = search(problem).plan
    assert found is not None
    return found


def _shifted(plan: Plan, rng: np.random.Generator) -> Plan:
    """A layer of each pipeline given to a neighbouring stage: with the slowest stage first or last the schedule
    hides some of what the formula of a step counts."""
    pipelines = []
    for line in plan.pipelines:
        stages = list(line.stages)
        if len(stages) > 1:
            s = int(rng.integers(0, len(stages) - 1))
            first, second = stages[s], stages[s + 1]
            edge = first.stop + int(rng.choice([-1, 1]))
            if first.start < edge < second.stop:
                stages[s] = msgspec.structs.replace(first, stop=edge)
                stages[s + 1] = msgspec.structs.replace(second, start=edge)
        pipelines.append(msgspec.structs.replace(line, stages=tuple(stages)))
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=tuple(pipelines)),))
    return plan.replace(strategies=(strategy,))


def _random(rng: np.random.Generator, names: tuple[str, ...], layers: int, batch: int) -> Plan:
    """Groups inside nodes, dealt to pipelines."""
    groups: list[tuple[str, ...]] = []
    for node in sorted({node_of(name) for name in names}):
        left = [name for name in names if name.startswith(f"{node}/")]
        rng.shuffle(left)
        while left:
            width = int(rng.choice([1, 2, 4]))
            groups.append(tuple(left[:width]))
            left = left[width:]
    order = [groups[i] for i in rng.permutation(len(groups))]
    count = int(rng.integers(1, min(4, len(order), batch) + 1))
    lines = [order[p::count] for p in range(count)]
    cuts = np.sort(rng.choice(np.arange(1, batch), count - 1, replace=False)).tolist()
    micro = np.diff([0, *cuts, batch]).tolist()
    pipelines = []
    for line, m in zip(lines, micro, strict=True):
        stages = line[:layers]
        ends = [0, *np.sort(rng.choice(np.arange(1, layers), len(stages) - 1, replace=False)).tolist(), layers]
        pipelines.append(
            Pipeline(
                stages=tuple(
                    Stage(
                        start=ends[s],
                        stop=ends[s + 1],
                        devices=members,
                        shares=tuple(int(x) for x in rng.integers(1, 5, len(members))),
                    )
                    for s, members in enumerate(stages)
                ),
                micro_batches=int(m),
            )
        )
    strategy = Strategy(modules=(ModulePlan(module="model", pipelines=tuple(pipelines)),))
    return Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=batch)


@pytest.mark.parametrize("name", ["small", "demo", "faults"])
def test_no_run_of_a_shipped_scenario_exceeds_it(name: str) -> None:
    outcome = simulate(load(Path(__file__).resolve().parents[2] / "examples" / "scenarios" / f"{name}.toml"))
    best = total(outcome, "bound").tokens_per_second
    for run in outcome.totals:
        assert run.tokens_per_second <= best * (1 + 1e-9), run.name
    for stretch in outcome.stretches:  # a step may be lucky, by its noise
        assert stretch.step_seconds >= stretch.bound * 0.97
