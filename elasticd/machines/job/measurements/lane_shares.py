"""The shares of tokens that lanes get: workers agree on them in votes, and the leader only tells of it."""

from __future__ import annotations

from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job.state.transaction import Turn

#: Slowdowns are in parts of a normal lane's time.
_NORMAL = 64


def measured(turn: Turn, plan: Plan, step: Step) -> None:
    """Takes in by which slowdowns lanes get their shares, and tells where one has changed."""
    told = dict(zip(step.devices, map(int, step.column("slowdown").tolist()), strict=True))
    before = turn.job.shares
    # Of each lane the first device of its first stage stands for all.
    heads = [lane.stages[0].devices[0] for lane in plan.loss_view.by_lane]
    after = {device: told[device] for device in heads if told.get(device, 0) > 0}
    if after == before and turn.job.shares_plan == plan.number:
        return
    same = turn.job.shares_plan == plan.number
    turn.set(shares=after, shares_plan=plan.number)
    if not same or before.keys() != after.keys():  # what another plan knows of its lanes is no change
        return
    for device, slowdown in after.items():
        if slowdown != before[device]:
            share = _NORMAL / slowdown
            text = f"the lane of {device} takes {slowdown / _NORMAL:.2f} times as long as a normal one; "
            turn.note(
                "shares",
                f"{text}since step {step.step + 2} it gets {share:.2f} of a share of tokens. No state moved.",
                device=device,
                slowdown=slowdown / _NORMAL,
                share=share,
                step=step.step + 2,
            )
