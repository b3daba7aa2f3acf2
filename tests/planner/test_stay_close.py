"""Of plans that are as fast, one in which the slow device gives away less moves fewer bytes, and is found."""

from __future__ import annotations

import msgspec
import pytest
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.placement.stay_close import rebalance_shares
from elasticd_planner.problem import Problem
from elasticd_planner.search import planner
from elasticd_planner.spec.plan import Plan, Stage

from elasticd.simulator.scenarios.model_shapes import PRESETS, model_spec
from tests.planner.models import cluster, plan, profile

MODEL = derive(model_spec("llama-70b", PRESETS["llama-70b"]), sample_tokens=4096, micro_batch=1)
SLOW = "n3/5"


def slow_stage(made: Plan) -> Stage:
    return made.stage(made.places[SLOW])


def test_a_straggler_gives_away_no_more_than_its_pipelines_micro_batches_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = cluster(*[8] * 8, memory=96 * 10**9)
    job = Problem(cluster=nodes, profile=MODEL, global_batch=64, micro_batch=1)
    healthy = planner.plan(job).plan
    assert healthy is not None
    slowed = msgspec.structs.replace(job, rates={SLOW: 2.57}, current=healthy)
    made = planner.plan(slowed).plan
    monkeypatch.setattr(planner, "BETWEEN", ())
    other = planner.plan(slowed).plan
    assert made is not None
    assert other is not None
    assert made.prediction is not None
    assert other.prediction is not None
    assert made.prediction.step_seconds <= other.prediction.step_seconds * (1 + planner.TOLERANCE)
    moved = [bytes_to_move(MODEL, healthy, each) for each in (made, other)]
    assert moved[0] < 0.8 * moved[1]
    shares = [dict(zip(s.devices, s.shares, strict=True))[SLOW] for s in map(slow_stage, (made, other))]
    assert shares[0] > shares[1]


def test_shares_by_a_part_of_the_rate_lie_between_equal_ones_and_those_by_the_rate() -> None:
    names = ["n0/0", "n0/1", "n0/2", "n0/3"]
    model = profile(share_units=24, layers=4)
    given = plan((1, [(4, names, [6, 6, 6, 6])])).pipelines
    slow = [rebalance_shares(given, {"n0/1": 4.0}, model, part)[0].stages[0].shares[1] for part in (0, 0.5, 1)]
    assert slow == [6, 3, 2]
    even = msgspec.structs.replace(model, uneven=False)
    assert rebalance_shares(given, {"n0/1": 4.0}, even, 1.0)[0].stages[0].shares == (6, 6, 6, 6)
