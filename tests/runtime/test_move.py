"""Moves where two copies do not fit: in place, where nobody takes what is left for a copy, and set aside."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from elasticd_migration.schema import Disagreement
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.records import Proposal
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.switch.copies import Copies
from elasticd.runtime.switch.move import move, prepare
from tests.runtime import gang
from tests.runtime.state_reader import StateReader
from tests.runtime.test_engine_parity import unpaced
from tests.runtime.test_snapshots import NEW, OLD, first, held_by
from tests.runtime.test_zero import STEPS, check, recipe

SWITCH = 2


def worker(device: str, store: Any, old: Plan, new: Plan, aside: tuple[str, ...] = ()) -> dict[str, Any]:
    """In place, unless the members `aside` set their old copies aside."""
    made, engine, done = recipe(), None, []
    if device in old.members:
        engine = first(device, store, old)
        done = [engine.step(step, lambda: 0) for step in range(SWITCH)]
        engine.settle()

    def attempt(number: int) -> Any:
        prepared = prepare(
            Proposal(
                number=number,
                epoch=1,
                plan=new.replace(number=number),
                old=old,
                in_place=not aside,
                aside=aside,
            ),
            made,
            device,
            unpaced,
            lambda part: PlanGroups(f"plan/{number}/{part}", device, "127.0.0.1", store),
        )
        return prepared, move(prepared, engine, SWITCH, made)

    if engine is not None:
        if device == "b/0":
            engine.optimizer.param_groups[0]["lr"] *= 2
        with pytest.raises(Disagreement):
            attempt(2)
        assert not engine.health.consumed, "nothing was moved: the old plan can go on"
        assert (engine.lent is not None) == (device in aside)
        engine.back()  # as the switcher does: a step under the old plan could follow
        if device == "b/0":
            engine.optimizer.param_groups[0]["lr"] /= 2
    else:
        with pytest.raises(Disagreement):
            attempt(2)
    reader = StateReader(engine) if engine is not None else None
    before = deepcopy(held_by(engine.state())) if aside and engine is not None else None
    prepared, side = attempt(3)
    assert reader is None or reader.waited_for
    said = []
    if aside and engine is not None:
        np.testing.assert_equal(held_by(engine.state()), before)  # its copy of the old plan, wherever it lies
    if engine is not None:
        assert engine.health.consumed != bool(aside)
        said = [copy.number for copy in Copies(lambda number, engine: None).report(3, engine, SWITCH).copies]
    if prepared.engine is None:
        return {"said": said, "losses": [d.outcome.vote.loss for d in done]}
    engine = prepared.engine
    done += [engine.step(step, lambda: 0) for step in range(side.step, STEPS)]
    engine.settle()
    return {
        "said": said,
        "losses": [d.outcome.vote.loss for d in done],
        "norms": [d.outcome.vote.norm for d in done],
        "held": held_by(engine.state()),
        "gradients left": any(p.grad is not None for _, (_, p) in engine.module.local.parameters.items()),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_goes_on_as_in_one_process_and_the_old_state_can_still_be_read() -> None:
    """Two of the three that held the old plan set it aside."""
    old, new = OLD, NEW.replace(number=3, state=StatePolicy(zero=1, replicas=2))
    names = tuple(dict.fromkeys((*old.members, *new.members)))
    results = gang.run(__file__, "worker", names, old, new, ("a/0", "b/0"), seconds=280)
    assert all(result["said"] == [old.number] for name, result in results.items() if name in old.members)
    joined = {device: results[device] for device in new.members}
    whole = joined["a/0"]
    joined["c/0"]["losses"], joined["c/0"]["norms"] = whole["losses"], whole["norms"]
    check(new, joined)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_goes_on_as_in_one_process_and_the_old_state_is_given_up() -> None:
    old, new = OLD, NEW.replace(number=3, state=StatePolicy(zero=1, replicas=2))
    names = tuple(dict.fromkeys((*old.members, *new.members)))
    results = gang.run(__file__, "worker", names, old, new, seconds=280)
    assert all(result["said"] == [] for result in results.values())
    joined = {device: results[device] for device in new.members}
    whole = joined["a/0"]
    joined["c/0"]["losses"], joined["c/0"]["norms"] = whole["losses"], whole["norms"]
    check(new, joined)


def test_a_plan_of_a_leader_that_shifts_the_data_is_refused() -> None:
    """Release 0.1 has it: its workers would read other samples than those of this release."""
    shifted = Proposal(number=2, epoch=1, plan=OLD.replace(number=2, sequence=128), old=None)

    def no_groups(part: str) -> PlanGroups:
        raise AssertionError(f"nothing is made for it: {part}")

    with pytest.raises(ValueError, match="samples read in other sequences"):
        prepare(shifted, recipe(), "a/0", unpaced, no_groups)
