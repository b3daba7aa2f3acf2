"""The shares of tokens and items that lanes get: workers agree on them in votes, leaders only tell of it."""

from __future__ import annotations

from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job.state.transaction import Transaction

#: Slowdowns are in parts of a normal lane's time.
_NORMAL = 64


def measured(turn: Transaction, plan: Plan, step: Step) -> None:
    """Takes in by which slowdowns lanes get their shares, and tells where one has changed."""
    before, same = turn.job.lanes.shares, turn.job.lanes.shares_plan == plan.number
    items_before = turn.job.lanes.item_shares if same else {}
    after = _slowdowns(plan.loss_view, step)
    items = {
        module.module: slow
        for module in plan.modules
        if module.items
        and module.module in step.modules
        and (slow := _slowdowns(plan.view(module.module), step.modules[module.module]))
    }
    if (after, items) == (before, items_before) and same:
        return
    turn.change("lanes", shares=after, shares_plan=plan.number, item_shares=items)
    if not same:  # what another plan knows of its lanes is no change
        return
    _publish_shares(turn, step, before, after, "tokens")
    named = {module.module: module.items for module in plan.modules}
    for name, slow in items.items():
        _publish_shares(
            turn, step, items_before.get(name) or dict.fromkeys(slow, _NORMAL), slow, named[name], name
        )


def _slowdowns(view: Plan, step: Step) -> dict[str, int]:
    """Of the lanes of a module [64ths], by the first device of the first stage, which stands for all."""
    slowdowns = dict(zip(step.devices, map(int, step.column("slowdown").tolist()), strict=True))
    heads = [lane.stages[0].devices[0] for lane in view.by_lane]
    return {device: slowdowns[device] for device in heads if slowdowns.get(device, 0) > 0}


def _publish_shares(
    turn: Transaction, step: Step, before: dict[str, int], after: dict[str, int], what: str, module: str = ""
) -> None:
    if before.keys() != after.keys():
        return
    for device, slowdown in after.items():
        if slowdown != before[device]:
            share = _NORMAL / slowdown
            place = f" in {module}" if module else ""
            text = f"the lane of {device}{place} takes {slowdown / _NORMAL:.2f} times as long as a normal one; "
            turn.note(
                "shares",
                f"{text}since step {step.step + 2} it gets {share:.2f} of a share of {what}. No state moved.",
                device=device,
                slowdown=slowdown / _NORMAL,
                share=share,
                step=step.step + 2,
            )
