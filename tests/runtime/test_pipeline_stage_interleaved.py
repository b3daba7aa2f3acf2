"""Interleaved stages at work: engines among threads train as one process does, to the last bits of float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import migrate
from elasticd_migration.transport import MemoryTransport
from elasticd_planner.cost.schedule import most_alive
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.runtime.comm.in_memory import MemoryPlanGroups, run_threads
from tests.migration.ranks import together
from tests.runtime.test_engine import all_forward_all_backward, engine_on, most_kept
from tests.runtime.test_engine_parity import CLIP, make_recipe, plan_of, reference, stage

PLANS = {
    "two stages, two chunks": plan_of(
        (8, [stage(0, 2, ("a/0", 1), later=((3, 4),)), stage(2, 3, ("a/1", 1), later=((4, 6),))])
    ),
    "two stages, three chunks, micro-batches left over": plan_of(
        (
            5,
            [
                stage(0, 1, ("a/0", 1), later=((2, 3), (4, 5))),
                stage(1, 2, ("a/1", 1), later=((3, 4), (5, 6))),
            ],
        ),
        (3, [stage(0, 6, ("b/0", 1))]),
    ),
    "three stages, two chunks, unequal groups": plan_of(
        (
            7,
            [
                stage(0, 1, ("a/0", 5), ("a/1", 3), later=((3, 4),)),
                stage(1, 2, ("b/0", 1), later=((4, 5),)),
                stage(2, 3, ("c/0", 3), ("c/1", 3), ("c/2", 2), later=((5, 6),)),
            ],
        ),
        (1, [stage(0, 4, ("d/0", 1)), stage(4, 6, ("d/1", 1))]),
    ),
    "fewer micro-batches than stages": plan_of(
        (
            2,
            [
                stage(0, 1, ("a/0", 1), later=((3, 4),)),
                stage(1, 2, ("b/0", 1), later=((4, 5),)),
                stage(2, 3, ("c/0", 1), later=((5, 6),)),
            ],
        ),
        micro_batch=4,
    ),
    "zero 2 beside another interleaved pipeline": plan_of(
        (4, [stage(0, 2, ("a/0", 1), later=((3, 4),)), stage(2, 3, ("a/1", 1), later=((4, 6),))]),
        (4, [stage(0, 1, ("b/0", 1), later=((2, 5),)), stage(1, 2, ("b/1", 1), later=((5, 6),))]),
    ).replace(state=StatePolicy(zero=2, replicas=1)),
}
STEPS = 3


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Plain torch in one process."""
    return reference(STEPS)


@pytest.mark.parametrize("name", PLANS)
def test_an_interleaved_layout_trains_like_one_process(
    name: str, alone: tuple[list[float], list[float], dict[str, torch.Tensor]]
) -> None:
    plan = PLANS[name]
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
        for parameter, (box, value) in result["weights"].items():
            whole = weights[parameter]
            worst = float((value - whole[box.slices(Box.whole(whole.shape))]).abs().max())
            assert worst < 1e-10, f"{device} {parameter}: {worst}"
            seen.add(parameter)
        place = plan.places[device]
        pipeline = plan.pipeline(place)
        promised = most_alive(len(pipeline.stages), place.stage, pipeline.micro_batches, (1,) * pipeline.chunks)
        assert result["alive"] == promised, f"{device}: activations as the schedule promises"
        # What a device did counts once for a micro-batch, whatever its chunks.
        measured = result["measured"]
        assert measured.micro_batches == pipeline.micro_batches
        part = plan.stage(place).layers * plan.stage(place).fraction(place.position)
        assert measured.block_work == pytest.approx(measured.tokens * part)
    assert seen == set(weights)


def test_gpipe_by_chunks_trains_alike(
    alone: tuple[list[float], list[float], dict[str, torch.Tensor]],
) -> None:
    recipe = replace(make_recipe(), schedule=all_forward_all_backward)

    def worker(plan_groups: MemoryPlanGroups) -> list[float]:
        engine = engine_on(plan_groups, recipe, PLANS["three stages, two chunks, unequal groups"])
        return [engine.step(step, lambda: 0).outcome.vote.loss for step in range(STEPS)]

    plan: Plan = PLANS["three stages, two chunks, unequal groups"]
    for losses in run_threads(plan.members, worker).values():
        assert losses == pytest.approx(alone[0], abs=1e-10)


def trained(
    plan: Plan, states: dict[str, LocalState] | None, steps: range
) -> tuple[list[float], dict[str, LocalState]]:
    """Losses of these steps under a plan, and the state of each member after them."""

    def worker(plan_groups: MemoryPlanGroups) -> tuple[list[float], LocalState]:
        engine = engine_on(
            plan_groups, make_recipe(), plan, states[plan_groups.me] if states is not None else None
        )
        losses = [engine.step(step, lambda: 0).outcome.vote.loss for step in steps]
        engine.settle()
        return losses, engine.state()

    found = run_threads(plan.members, worker)
    return found[plan.members[0]][0], {device: state for device, (_, state) in found.items()}


def moved(old: Layouts, new: Layouts, states: dict[str, LocalState]) -> dict[str, LocalState]:
    """The state of every rank under the new layouts, by a migration among threads."""
    names = tuple(dict.fromkeys((*old.plan.members, *new.plan.members)))

    def attempt(end: MemoryTransport) -> LocalState:
        return migrate(old, new, states.get(names[end.rank], LocalState()), end).state

    found: dict[str, LocalState] = {}
    for name, state in zip(names, together(MemoryTransport.connect(names), attempt), strict=True):
        assert isinstance(state, LocalState), state
        found[name] = state
    return found


def test_a_job_goes_from_plain_stages_to_interleaved_ones_and_back() -> None:
    """Also from one number of chunks to another, over devices that come and go, optimizer state and all."""
    spec = make_recipe().model.spec
    plain = plan_of((8, [stage(0, 3, ("a/0", 1)), stage(3, 6, ("a/1", 1))]))
    way = [plain, PLANS["two stages, two chunks"], PLANS["three stages, two chunks, unequal groups"], plain]
    losses: list[float] = []
    states: dict[str, LocalState] | None = None
    for at, plan in enumerate(way):
        if states is not None:
            states = moved(Layouts(spec, way[at - 1]), Layouts(spec, plan), states)
        made, states = trained(plan, states, range(at, at + 1))
        losses += made
    assert losses == pytest.approx(reference(len(way))[0], abs=1e-10)


def test_what_was_sent_is_let_go_as_its_answer_comes() -> None:
    """A stage sends three things for each of eight micro-batches; it keeps those that are on their way."""
    longest = 13 * 32 * 8
    assert most_kept(PLANS["two stages, two chunks"]) <= 8 * longest
