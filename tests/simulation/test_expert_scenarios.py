"""A job of a model with experts on modelled devices: these are placed by load, and a hot device is not slow."""

from __future__ import annotations

from typing import cast

import pytest
from elasticd_planner.problem import Problem
from elasticd_planner.search.module_cost import predicted_seconds
from elasticd_planner.search.planner import plan as planned

from elasticd.config.tree import ConfigError
from elasticd.simulator.devices.expert_loads import KEPT
from elasticd.simulator.devices.expert_truth import ExpertTruth
from elasticd.simulator.devices.module_truth import ModuleTruth
from elasticd.simulator.devices.packed_truth import PackedTruth
from elasticd.simulator.results.baselines import truth_of
from elasticd.simulator.run import Simulation
from elasticd.simulator.scenarios.scenario import parse

EXPERTS = """
name = "experts"
seed = 1
steps = 110
[cluster]
nodes = 1
devices = 8
[model]
layers = 4
width = 1024
heads = 16
hidden = 512
experts = 64
chosen = 8
tokens = 2048
global_batch = 16
[experts]
zipf = 0.9
drift = 0.01
[[fault]]
step = 60
kind = "slow"
device = "n0/1"
factor = 2.0
"""
#: The same on two nodes and beside an encoder of images. A device is twice slower, and another one dies.
BESIDE = f"""{EXPERTS.replace("steps = 110", "steps = 90").replace("step = 60", "step = 30")}
[[fault]]
step = 60
kind = "kill"
device = "n1/2"
lasts = 20.0
[[module]]
name = "vision"
layers = 2
width = 512
heads = 8
hidden = 1024
vocabulary = 64
items_a_sample = 2.0
rows = 256
""".replace("nodes = 1\ndevices = 8", "nodes = 2\ndevices = 4\nbetween = { bandwidth = 2e11, latency = 1e-5 }")


def test_experts_are_placed_and_a_device_with_hot_ones_is_not_taken_for_slow() -> None:
    simulation = Simulation(parse(EXPERTS, "experts.toml"))
    simulation.run()
    slow = [event.text for event in simulation.timeline if event.kind == "slow"]
    assert ["n0/1" in text for text in slow] == [True]
    assert len([event for event in simulation.timeline if event.kind == "proposed"]) <= 4
    plan = simulation.worker_group.plan
    assert plan is not None
    assert any(stage.experts for _, _, stage in plan.walk())
    assert "experts placed by load" in plan.reason


def test_experts_of_a_language_model_beside_an_encoder_are_placed_through_faults() -> None:
    """A device becomes slow; another one dies, with it those of its node, and comes back."""
    simulation = Simulation(parse(BESIDE, "beside.toml"))
    simulation.run()
    slow = [event.text for event in simulation.timeline if event.kind == "slow"]
    assert {"n0/1" in text for text in slow} == {True}
    assert {"fenced", "resumed"} <= {event.kind for event in simulation.timeline}
    plan = simulation.worker_group.plan
    assert plan is not None
    assert {module.module for module in plan.modules} == {"language", "vision"}
    assert any(stage.experts for _, _, stage in plan.loss_view.walk())


def test_experts_of_a_job_that_packs_are_placed_and_a_slow_device_has_fewer_rows() -> None:
    packs = EXPERTS.replace("steps = 110", "steps = 70").replace("step = 60", "step = 30")
    simulation = Simulation(parse(f'{packs}[data]\ncorpus = "wikipedia"\nlongest = 4096\n', "packs.toml"))
    simulation.run()
    slow = [event.text for event in simulation.timeline if event.kind == "slow"]
    assert {"n0/1" in text for text in slow} == {True}
    plan = simulation.worker_group.plan
    assert plan is not None
    assert plan.packed
    truth = simulation.truth
    assert isinstance(truth, PackedTruth)
    times = truth.step(plan, 70)
    rows = sum(sum(each.expert_rows.get(0, ())) for each in truth.measurements(plan, 70, times))
    assert rows == pytest.approx(sum(truth.loads.load(70).rows[0]), rel=0.01)


def test_a_step_of_modules_takes_what_the_planner_predicts_for_its_load() -> None:
    given = parse(BESIDE.replace("drift = 0.01", "drift = 0.01\n[times]\nnoise = 0"), "beside.toml")
    truth = truth_of(given)
    assert isinstance(truth, ModuleTruth)
    assert truth.loads is not None
    problem = Problem(
        cluster=truth.cluster,
        profile=truth.profile,
        global_batch=given.model.global_batch,
        micro_batch=given.model.micro_batch,
        module=given.model.module,
        modules=truth.modules,
        experts=truth.loads.load(10),
    )
    made = planned(problem, 1).plan
    assert made is not None
    assert any(stage.experts for _, _, stage in made.loss_view.walk())
    times = truth.step(made, 10)
    assert float(times.seconds) == pytest.approx(predicted_seconds(made, problem), rel=0.01)
    reports = truth.measurements(made, 10, times)
    rows = [sum(own) for each in reports for block, own in each.expert_rows.items() if block == 0]
    assert sum(rows) == pytest.approx(16 * 2048 * 8, rel=0.01)


def test_a_drifting_load_is_a_function_of_the_step_of_which_one_in_64_is_kept() -> None:
    truths = [truth_of(parse(EXPERTS, "experts.toml")) for _ in range(2)]
    first, second = (cast(ExpertTruth, truth).loads for truth in truths)
    forward = {step: first.load(step) for step in range(0, 200, 7)}
    assert {step: second.load(step) for step in reversed(forward)} == forward
    assert forward[0] != forward[7]
    assert len(first._kept) == 1 + max(forward) // KEPT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (EXPERTS.replace("experts = 64\nchosen = 8\n", ""), "is of a model with experts: add"),
        (EXPERTS.replace("chosen = 8", "chosen = 65"), "chosen = 65 must be from 1 to the 64 experts"),
        (EXPERTS.replace("zipf = 0.9", "zipf = -1"), "zipf = -1"),
    ],
)
def test_unfit_scenarios_of_experts_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text, "experts.toml")
