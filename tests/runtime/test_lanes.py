"""Lanes at work: engines among threads train as one process does, to the last bits of float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_planner.cost.schedule import most_alive
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from elasticd.runtime.data.options import DataOptions
from tests import sizes
from tests.runtime import gang, test_engine_parity
from tests.runtime.test_engine import engine_on
from tests.runtime.test_engine_parity import CLIP, make_recipe, plan_of, reference, stage
from tests.runtime.test_pipeline_stage_interleaved import moved, trained

PLANS = {
    "1 + 1": plan_of(((5, 3), [stage(0, 6, ("a/0", 1), ("b/0", 1), lanes=(1, 1))])),
    "2 + 1, uneven, in two stages": plan_of(
        (
            (5, 3),
            [
                stage(0, 2, ("a/0", 5), ("a/1", 3), ("b/0", 1), lanes=(2, 1)),
                stage(2, 6, ("a/2", 1), ("b/1", 2), ("b/2", 1), lanes=(1, 2)),
            ],
        ),
    ),
    "three lanes of unlike width beside a deeper pipeline": plan_of(
        (
            (1, 3, 1),
            [stage(0, 6, ("a/0", 1), ("b/0", 1), ("b/1", 2), ("c/0", 1), lanes=(1, 2, 1))],
        ),
        (3, [stage(0, 1, ("d/0", 1)), stage(1, 4, ("d/1", 2), ("d/2", 1)), stage(4, 6, ("d/3", 1))]),
    ),
    "two pipelines of lanes, micro-batches of two": plan_of(
        (
            (1, 1),
            [
                stage(0, 3, ("a/0", 1), ("b/0", 1), lanes=(1, 1)),
                stage(3, 6, ("a/1", 1), ("b/1", 1), lanes=(1, 1)),
            ],
        ),
        ((1, 1), [stage(0, 6, ("c/0", 2), ("c/1", 1), ("d/0", 1), lanes=(2, 1))]),
        micro_batch=2,
    ),
    "interleaved, fewer rows than stages in one lane": plan_of(
        (
            (6, 2),
            [
                stage(0, 1, ("a/0", 1), ("b/0", 1), later=((3, 4),), lanes=(1, 1)),
                stage(1, 2, ("a/1", 5), ("a/2", 3), ("b/1", 1), later=((4, 5),), lanes=(2, 1)),
                stage(2, 3, ("a/3", 1), ("b/2", 1), later=((5, 6),), lanes=(1, 1)),
            ],
        ),
    ),
}
POLICIES = {
    "zero 0": StatePolicy(),
    "zero 1": StatePolicy(zero=1, replicas=1),
    "zero 1, r = 2": StatePolicy(zero=1, replicas=2),
    "zero 2": StatePolicy(zero=2, replicas=1),
}
STEPS = 3
CASES = list(product(PLANS, POLICIES))
#: Each layout without ZeRO, and each policy once.
SOME = [
    *((name, "zero 0") for name in tuple(PLANS)[::2]),
    ("2 + 1, uneven, in two stages", "zero 1"),
    ("two pipelines of lanes, micro-batches of two", "zero 1, r = 2"),
    ("three lanes of unlike width beside a deeper pipeline", "zero 2"),
]


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Plain torch in one process."""
    return reference(STEPS)


@pytest.mark.parametrize(("name", "policy"), sizes.beside(SOME, CASES))
def test_lanes_train_like_one_process(
    name: str, policy: str, alone: tuple[list[float], list[float], dict[str, torch.Tensor]]
) -> None:
    plan = PLANS[name].replace(state=POLICIES[policy])
    losses, norms, weights = alone
    assert max(norms) > CLIP, "clipping must be active"

    def worker(plan_groups: MemoryPlanGroups) -> dict[str, Any]:
        engine = engine_on(plan_groups, make_recipe(), plan)
        done = [engine.step(step, lambda: 0) for step in range(STEPS)]
        engine.settle()
        assert engine.module.runner is not None
        return {
            "losses": [each.outcome.vote.loss for each in done],
            "norms": [each.outcome.vote.norm for each in done],
            "samples": [each.samples for each in done],
            "weights": {
                n: (box, p.detach().cpu()) for n, ((box,), p) in engine.module.local.parameters.items()
            },
            "alive": engine.module.runner.most_alive,
            "measured": done[-1].measurement,
        }

    found = run_threads(plan.members, worker)
    seen = set()
    for device, result in found.items():
        assert result["losses"] == found[plan.members[0]]["losses"], "all ranks fold the same bits"
        assert result["losses"] == pytest.approx(losses, abs=1e-10)
        assert result["norms"] == pytest.approx(norms, abs=1e-9)
        assert result["samples"] == [make_recipe().sampler.samples(step) for step in range(STEPS)]
        for parameter, (box, value) in result["weights"].items():
            whole = weights[parameter]
            worst = float((value - whole[box.slices(Box.whole(whole.shape))]).abs().max())
            assert worst < 1e-10, f"{device} {parameter}: {worst}"
            seen.add(parameter)
        place = plan.places[device]
        lane = plan.pipeline(place)
        promised = most_alive(len(lane.stages), place.stage, lane.micro_batches, (1,) * lane.chunks)
        assert result["alive"] == promised, f"{device}: activations as the schedule of its lane promises"
        assert result["measured"].micro_batches == lane.micro_batches
    assert seen == set(weights)


def worker(device: str, store: Any, plan: Plan) -> dict[str, Any]:
    """As one of several processes, over gloo."""
    return test_engine_parity.worker(device, store, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", sizes.beside(["2 + 1, uneven, in two stages"], PLANS))
def test_processes_train_like_one(name: str) -> None:
    test_engine_parity.check(PLANS[name], gang.run(__file__, "worker", PLANS[name].members, PLANS[name]))


def test_samples_dealt_to_lanes_by_their_lengths_train_alike(
    alone: tuple[list[float], list[float], dict[str, torch.Tensor]],
) -> None:
    plan = plan_of(
        ((1, 2), [stage(0, 6, ("a/0", 1), ("b/0", 1), lanes=(1, 1))]),
        (1, [stage(0, 6, ("c/0", 1))]),
        micro_batch=2,
    )
    recipe = replace(make_recipe(), data=DataOptions(length=lambda index: 5 + index % 9))
    dealt = recipe.feed.dealing(plan, 0)()
    assert {piece.length for row in dealt.pipelines[0] for lane in row.lanes for piece in lane} <= {
        *range(5, 14)
    }

    def trainer(plan_groups: MemoryPlanGroups) -> list[float]:
        engine = engine_on(plan_groups, recipe, plan)
        return [engine.step(step, lambda: 0).outcome.vote.loss for step in range(STEPS)]

    for losses in run_threads(plan.members, trainer).values():
        assert losses == pytest.approx(alone[0], abs=1e-10)


def test_a_job_goes_from_pipelines_to_lanes_and_back() -> None:
    """Also from one number of lanes to another, over devices that come and go, with and without ZeRO."""
    spec = make_recipe().model.spec
    apart = plan_of((5, [stage(0, 6, ("a/0", 1))]), (3, [stage(0, 6, ("b/0", 1))]))
    uneven, sharded = PLANS["2 + 1, uneven, in two stages"], StatePolicy(zero=2, replicas=1)
    way = [
        apart,
        PLANS["1 + 1"],
        uneven.replace(state=sharded),
        PLANS["interleaved, fewer rows than stages in one lane"].replace(state=sharded),
        apart,
    ]
    losses: list[float] = []
    states: dict[str, LocalState] | None = None
    for at, plan in enumerate(way):
        if states is not None:
            states = moved(Layouts(spec, way[at - 1]), Layouts(spec, plan), states)
        made, states = trained(plan, states, range(at, at + 1))
        losses += made
    assert losses == pytest.approx(reference(len(way))[0], abs=1e-10)
