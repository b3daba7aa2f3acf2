"""Workers share tokens by the speed of lanes without their leader, which tells of it."""

from __future__ import annotations

from typing import cast

import msgspec
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job.measurements import lane_shares
from elasticd.machines.job.state.job_state import JobPhase, JobState, Part
from elasticd.machines.job.state.transaction import Transaction
from tests.machines.test_recovery import running
from tests.planner.test_module_measurements import BOTH, ENCODER, measured


def test_a_share_that_has_changed_is_told_once_and_not_the_one_that_a_plan_begins_with() -> None:
    world = running()
    plan = world.plan()
    assert plan is not None
    heads = [lane.stages[0].devices[0] for lane in plan.by_lane]
    world.slowdowns = dict.fromkeys(plan.places, 64)
    world.train(3)
    assert "shares" not in world.kinds()
    world.slowdowns[heads[-1]] = 128
    world.train(3)
    (note,) = [note for note in world.notes if note.kind == "shares"]
    assert f"the lane of {heads[-1]} takes 2.00 times as long as a normal one" in note.text
    assert "it gets 0.50 of a share of tokens. No state moved." in note.text
    assert world.job.lanes.shares[heads[-1]] == 128


def test_jobs_that_pad_tell_nothing() -> None:
    world = running()
    world.train(3)
    assert world.job.lanes.shares == {}


def test_a_share_of_items_is_told_with_its_module_and_goes_with_the_plan() -> None:
    told: list[str] = []
    job = JobState(job="j", phase=JobPhase.RUNNING, since=0.0, plan=BOTH)

    class Told:
        """A turn that notes."""

        def __init__(self) -> None:
            self.job = job

        def change(self, part: Part, **changes: object) -> None:
            self.job = self.job.changed(part, **changes)

        def note(self, kind: str, text: str, **_: object) -> None:
            told.append(f"{kind}: {text}")

    turn = cast(Transaction, Told())
    for step, slowdown in enumerate((64, 64, 192, 192)):
        reports = [
            msgspec.structs.replace(
                each,
                modules={
                    name: msgspec.structs.replace(own, slowdown=slowdown if each.device == ENCODER else 64)
                    for name, own in each.modules.items()
                },
            )
            for each in measured(BOTH, step)
        ]
        lane_shares.measured(turn, BOTH, Step.of(reports))
    (text,) = told
    assert text.startswith(f"shares: the lane of {ENCODER} in vision takes 3.00 times as long as a normal one")
    assert "it gets 0.33 of a share of images. No state moved." in text
    assert turn.job.lanes.item_shares == {"vision": {ENCODER: 192, "n1/0": 64}}
