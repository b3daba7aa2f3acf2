"""A job of a model with experts on modelled devices: these are placed by load, and a hot device is not slow."""

from __future__ import annotations

from typing import cast

import pytest

from elasticd.config.tree import ConfigError
from elasticd.simulator.devices.expert_truth import KEPT, ExpertTruth
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


def test_a_drifting_load_is_a_function_of_the_step_of_which_one_in_64_is_kept() -> None:
    truths = [truth_of(parse(EXPERTS, "experts.toml")) for _ in range(2)]
    first, second = (cast(ExpertTruth, truth) for truth in truths)
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
