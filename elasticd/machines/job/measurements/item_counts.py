"""The items of samples, by module: a lasting change of their number or size is another problem to plan for."""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.item_shift import ItemShiftState
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job.measurements import step_prediction
from elasticd.machines.job.state.transaction import Turn


def measured(turn: Turn, plan: Plan, step: Step) -> None:
    """Takes in the items of a whole step. Where they have shifted, later plans are made for them as they are
    now."""
    shifts, modules, said = dict(turn.job.item_shifts), list(turn.job.modules), []
    for at, module in enumerate(modules):
        own = step.modules.get(module.name)
        if own is None:
            continue
        # Of each lane the first device of its first stage stands for all.
        heads = {lane.stages[0].devices[0] for lane in plan.view(module.name).by_lane}
        first = [place for place, device in enumerate(own.devices) if device in heads]
        items, rows = (float(own.column(name)[first].sum()) for name in ("micro_batches", "tokens"))
        before = shifts.get(module.name) or ItemShiftState.begin(module.items_a_sample, module.rows_an_item)
        shifts[module.name], shifted = before.after(items, rows, plan.global_batch, turn.settings.detect)
        if shifted:
            new = shifts[module.name]
            now = msgspec.structs.replace(
                module, items_a_sample=new.items.reference, rows_an_item=new.rows.reference
            )
            modules[at] = now
            said.append(
                f"{now.items} of {now.name}: {now.items_a_sample:.2f} in a sample, of {now.rows_an_item:.0f} "
                f"rows, in the mean; before, {module.items_a_sample:.2f} of {module.rows_an_item:.0f}"
            )
    turn.set(item_shifts=shifts)
    if not said:
        return
    turn.set(modules=tuple(modules))
    seconds = step_prediction.predict_anew(turn, None)
    step_prediction.keep_profile(turn)
    turn.note("shifted", "; ".join(said), step=step.step, plan=turn.job.number, step_seconds=seconds)
