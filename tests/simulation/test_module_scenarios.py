"""Jobs of several modules in the simulator: seconds of a step, measurements, and what becomes of faults."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from elasticd_planner.problem import Problem
from elasticd_planner.search.module_cost import predicted_seconds
from elasticd_planner.search.planner import plan as planned
from elasticd_planner.spec.plan import Plan

from elasticd.chaos.faults import Fault
from elasticd.config.tree import ConfigError
from elasticd.simulator.devices.module_truth import ModuleTruth
from elasticd.simulator.results.baselines import truth_of
from elasticd.simulator.run import Simulation
from elasticd.simulator.scenarios.scenario import Times
from tests.simulation.checks import scenario
from tests.simulation.scenes import SMALL

#: An encoder that takes about as long as the model itself, and one that is small and frozen.
MODULES = """
[[module]]
name = "vision"
layers = 8
width = 512
heads = 8
hidden = 2048
vocabulary = 64
items_a_sample = 2.0
rows = 512

[[module]]
name = "audio"
layers = 2
width = 256
heads = 4
hidden = 512
vocabulary = 64
items = "clips"
items_a_sample = 0.5
rows = 128
trained = false
"""
TEXT = SMALL.replace("736 MiB", "8 GiB") + MODULES


def at_work(noise: float = 0.0) -> tuple[ModuleTruth, Problem, Plan]:
    """The modelled cluster, the problem that a coordinator would solve if it knew all, and the best plan."""
    given = scenario(TEXT)
    given = msgspec.structs.replace(given, times=msgspec.structs.replace(given.times, noise=noise))
    truth = truth_of(given)
    assert isinstance(truth, ModuleTruth)
    problem = Problem(
        cluster=truth.cluster,
        profile=truth.profile,
        global_batch=given.model.global_batch,
        micro_batch=given.model.micro_batch,
        module=given.model.module,
        modules=truth.modules,
    )
    made = planned(problem, 1).plan
    assert made is not None
    return truth, problem, made


def test_a_step_takes_what_the_planner_predicts_where_it_knows_all() -> None:
    truth, problem, plan = at_work()
    assert {module.module for module in plan.modules} == {"language", "vision", "audio"}
    assert float(truth.step(plan, 0).seconds) == pytest.approx(predicted_seconds(plan, problem))
    truth.slow(["n0/1"], 3.0)
    slowed = msgspec.structs.replace(problem, rates={"n0/1": 3.0})
    # Of the passes in their planned order; the prediction orders them by the new times.
    assert truth.typical(plan) == pytest.approx(predicted_seconds(plan, slowed), rel=0.1)
    for step in range(1, 6):
        followed = float(truth.step(plan, step).seconds)
    assert followed < truth.typical(plan) * 1.01
    assert followed < predicted_seconds(plan, slowed), "a slow lane of items has fewer of them"


def test_devices_report_each_module_that_they_compute_with() -> None:
    truth, _, plan = at_work(noise=0.01)
    times = truth.step(plan, 4)
    reports = {each.device: each for each in truth.measurements(plan, 4, times)}
    for name, items in (("vision", 16), ("audio", 4)):
        view = plan.view(name)
        heads = [reports[lane.stages[0].devices[0]].modules.get(name) for lane in view.by_lane]
        counted = sum(own.items for own in heads if own is not None)
        assert abs(counted - items) < 4 * items**0.5, "drawn around the mean"
        rows = {"vision": 512, "audio": 128}[name]
        assert all(own is None or own.tokens == own.items * rows for own in heads)
    for device, own in reports.items():
        computed = own.block_seconds + own.embed_seconds + own.head_seconds
        computed += sum(part.compute_seconds for part in own.modules.values())
        assert 0 < computed <= own.step_seconds, device
    assert truth.measurements(plan, 4, truth.step(plan, 4))[0].tokens > 0


def test_faults_of_a_job_of_several_modules() -> None:
    """A device dies, the leader changes, another device slows down, and samples have more images."""
    faults = (
        Fault(kind="kill", device="n0/0", step=5),
        Fault(kind="takeover", step=6),
        Fault(kind="slow", device="n1/1", factor=3.0, step=20),
        Fault(kind="shift", items=4.0, step=40),
    )
    text = TEXT[: TEXT.rindex("[[module]]")]
    given = scenario(text, faults=faults, steps=50)
    simulation = Simulation(msgspec.structs.replace(given, times=Times(noise=0.0)))
    simulation.run()
    events = {event.kind: event for event in simulation.timeline}
    assert {"slow", "shifted", "fenced", "resumed", "takeover", "finished"} <= set(events)
    assert "images of vision: 4.00 in a sample" in events["shifted"].text
    assert simulation.launcher.restarts == 0
    for before, after in pairwise(simulation.stretches):
        assert after.first_step == before.first_step + before.steps
    assert all(each.step_seconds >= each.bound * (1 - 1e-4) for each in simulation.stretches)
    plan = simulation.worker_group.plan
    assert plan is not None
    assert {*plan.view("vision").members} <= {*plan.members} == {"n1/0", "n1/1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT.replace('name = "audio"', 'name = "vision"'), "two modules are named 'vision'"),
        (TEXT.replace('name = "audio"', 'name = "language"'), "it needs a name (not 'language')"),
        (TEXT.replace("items_a_sample = 0.5", "items_a_sample = 0.0"), "items_a_sample = 0.0 must be above 0"),
        (TEXT + "[data]\nlognormal = [6.0, 1.0]\nlongest = 1000\n", "leave out [data] or [[module]]"),
        (SMALL + '[[fault]]\nkind = "shift"\nitems = 2.0\nstep = 5\n', "add [[module]], or shift tokens"),
        (TEXT + '[[fault]]\nkind = "shift"\nstep = 5\n', "or items = 0 how many items"),
    ],
)
def test_scenarios_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        scenario(text)
    assert words in str(refused.value)
