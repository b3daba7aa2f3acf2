"""What the modelled devices do: the schedule event by event, measurements that add up, bytes as the planner."""

from __future__ import annotations

import math

import msgspec
import pytest
from elasticd_planner.cost.schedule_timeline import played_seconds
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.spec.cluster import Cluster, Level
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.simulator.devices.device_model import FORWARD, DeviceModel
from elasticd.simulator.devices.transfer_time import move
from elasticd.simulator.scenarios.scenario import Scenario, parse
from tests.simulation.scenes import SMALL

SCENARIO: Scenario = parse(SMALL, "small.toml")
CLUSTER, PROFILE = SCENARIO.cluster.cluster(), SCENARIO.truth()


def truth(noise: float = 0.0, cluster: Cluster = CLUSTER) -> DeviceModel:
    return DeviceModel(cluster, SCENARIO.truth, SCENARIO.model.tokens, seed=1, noise=noise, overhead=0.0)


def plan(*pipelines: Pipeline, number: int = 1) -> Plan:
    return Plan(
        number=number,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),),
        micro_batch=1,
        global_batch=8,
    )


def stage(start: int, stop: int, *devices: str, shares: tuple[int, ...] | None = None) -> Stage:
    return Stage(start=start, stop=stop, devices=devices, shares=shares or (8 // len(devices),) * len(devices))


UNEVEN = plan(
    Pipeline(stages=(stage(0, 7, "n0/0", "n1/0", shares=(5, 3)), stage(7, 12, "n0/1")), micro_batches=6),
    Pipeline(stages=(stage(0, 12, "n1/1"),), micro_batches=2),
)
EVEN = plan(Pipeline(stages=(stage(0, 6, "n0/0", "n0/1"), stage(6, 12, "n1/0", "n1/1")), micro_batches=8))


def test_lanes_take_what_pipelines_of_their_own_do() -> None:
    stages = (Stage(start=0, stop=12, devices=("n0/0", "n1/0", "n1/1"), shares=(5, 3, 8), lanes=(2, 1)),)
    lanes = plan(Pipeline(stages=stages, micro_batches=8, rows=(6, 2)))
    apart = plan(*lanes.by_lane, number=2)
    for made in (lanes, apart):
        assert made.members == ("n0/0", "n1/0", "n1/1")
    here = truth()
    here.slow(["n1/1"], 3.0)
    assert here.step(lanes, 0).seconds == here.step(apart, 0).seconds
    told = [
        [msgspec.structs.replace(each, plan=0) for each in here.measurements(made, 0, here.step(made, 0))]
        for made in (lanes, apart)
    ]
    assert told[0] == told[1]
    assert [each.micro_batches for each in told[0]] == [6, 6, 2]


def test_a_step_is_the_schedule_played_pass_by_pass_and_the_reduction() -> None:
    world = truth()
    world.slow(["n0/1"], 2.0)
    unit = PROFILE.tokens * PROFILE.block.seconds
    edge = PROFILE.tokens * PROFILE.head.seconds
    size = PROFILE.boundary_bytes * PROFILE.tokens
    count = 7 * PROFILE.block.collectives + PROFILE.embed.collectives
    waits = count * 2 * CLUSTER.between.seconds(size / 2)
    own = [7 * unit * 5 / 8, (5 * unit + edge) * 2.0]
    forward = [own[0] * FORWARD + waits / 2, own[1] * FORWARD]
    backward = [own[0] * (1 - FORWARD) + waits / 2, own[1] * (1 - FORWARD)]
    line = played_seconds(forward, backward, [CLUSTER.inside.seconds(size)], 6)
    alone = 2 * (12 * unit + edge)
    whole = 12 * PROFILE.block.parameter_bytes + PROFILE.embed.parameter_bytes + PROFILE.head.parameter_bytes
    reduction = 2 * CLUSTER.between.seconds(whole / 2)
    assert world.step(UNEVEN, 0).seconds == pytest.approx(max(line, alone) + reduction)


@pytest.mark.parametrize("made", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_what_a_member_measures_adds_up_to_the_step(made: Plan) -> None:
    world = truth(noise=0.02)
    times = world.step(made, 5)
    measured = world.measurements(made, 5, times)
    assert [m.device for m in measured] == list(made.members)
    for m in measured:
        parts = m.block_seconds + m.embed_seconds + m.head_seconds + m.tensor_seconds
        assert parts + m.boundary_seconds + m.reduce_seconds == pytest.approx(times.seconds)
        assert min(m.tensor_seconds, m.boundary_seconds, m.reduce_seconds) >= 0
        assert m.block_seconds / m.block_work == pytest.approx(PROFILE.block.seconds, rel=0.1)


def test_noise_is_a_function_of_seed_and_step() -> None:
    world, again = truth(noise=0.01), truth(noise=0.01)
    again.noise(3)
    assert (world.noise(7) == again.noise(7)).all()
    assert (world.noise(7) != world.noise(8)).any()
    assert world.typical(EVEN) == pytest.approx(truth().step(EVEN, 0).seconds, rel=0.05)


def test_a_slow_device_shows_in_rates_and_in_its_own_computation_alone() -> None:
    world = truth()
    before = world.measurements(EVEN, 0, world.step(EVEN, 0))
    world.slow(["n1/0"], 3.0)
    assert world.rates == {"n1/0": 3.0}
    after = world.measurements(EVEN, 0, world.step(EVEN, 0))
    ratio = {b.device: a.block_seconds / b.block_seconds for b, a in zip(before, after, strict=True)}
    assert ratio == {name: pytest.approx(3.0 if name == "n1/0" else 1.0) for name in EVEN.members}


def test_a_mean_is_that_of_its_steps_and_is_kept_for_these_speeds_and_lengths_alone() -> None:
    world = truth(noise=0.01)
    steps = [float(world.step(UNEVEN, index).seconds) for index in range(8)]
    assert world.typical(UNEVEN) == pytest.approx(sum(steps) / 8, rel=1e-12)
    world.slow(["n0/0"], 2.0)
    assert world.typical(UNEVEN) > 1.05 * sum(steps) / 8
    world.slow(["n0/0"], 1.0)
    world.shift(2 * SCENARIO.model.tokens)
    assert world.typical(UNEVEN) > 1.9 * sum(steps) / 8


def test_longer_samples_need_more_memory_and_whoever_lacks_it_is_named() -> None:
    world = truth()
    assert world.overfull(EVEN) == ""
    world.shift(64 * SCENARIO.model.tokens)
    assert world.overfull(EVEN) == "n0/0"
    world.shift(SCENARIO.model.tokens // 2)
    assert world.overfull(EVEN) == ""


def test_a_device_that_comes_back_is_as_fast_as_any() -> None:
    world = truth()
    world.slow(["n0/1"], 3.0)
    world.kill(["n0/1"])
    assert (world.rates, world.speeds) == ({}, {"n0/1": math.inf})
    world.join(["n0/1"])
    assert world.speeds == {}


def test_a_move_counts_the_bytes_that_the_planner_counts() -> None:
    found = move(truth(), EVEN, UNEVEN)
    assert found.total == pytest.approx(bytes_to_move(PROFILE, EVEN, UNEVEN), abs=len(UNEVEN.members))
    assert found.seconds >= max(found.lacking.values()) / CLUSTER.inside.bandwidth
    assert move(truth(), EVEN, EVEN).total == 0
    assert move(truth(), None, EVEN).seconds == 0.0, "the first plan is filled from the seed"


def test_a_move_takes_what_each_level_of_links_takes() -> None:
    text = SMALL.replace(
        "[cluster]\n",
        """[cluster]
levels = [{ name = "rack", link = { bandwidth = 1e12, latency = 0.0 }, groups = [["n0"], ["n1"]] }]
""",
    )
    assert text != SMALL
    here = parse(text, "racks.toml").cluster.cluster()
    assert here.reach(["n0/0", "n1/0"]) == here.between, "one node in each rack"
    # A node's link is quick; what racks exchange takes as long as before.
    assert move(truth(cluster=here), EVEN, UNEVEN).seconds == move(truth(), EVEN, UNEVEN).seconds
    together = msgspec.structs.replace(
        here, levels=(Level(name="rack", link=here.levels[0].link, groups=(("n0", "n1"),)),)
    )
    found = move(truth(cluster=together), EVEN, UNEVEN)
    assert found.seconds == max(found.lacking.values()) / here.inside.bandwidth, "nothing leaves the rack"
