"""The items of samples, by module: a lasting change of their number or size is another problem to plan for.

How much longer a row takes in a larger item the shapes only guess. The steps by which a change of size was seen
know it: what they took is what the module's profile says from then on.
"""

from __future__ import annotations

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.detection.item_shift import ItemShiftState
from elasticd_planner.detection.lengths import evaluated, item_rise
from elasticd_planner.problem import ModuleProblem
from elasticd_planner.profiling.fit import remeasured
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sequence_lengths import even
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job.measurements import data_lengths, step_prediction
from elasticd.machines.job.state.job_state import JobState
from elasticd.machines.job.state.transaction import Transaction

#: How far the mean size of the items in a step may be from the new one for it to say what they take [part].
OFF = 0.1


def measured(turn: Transaction, plan: Plan, step: Step) -> None:
    """Takes in the items of a whole step. Where they have shifted, later plans are made for them as they are
    now."""
    shifts, modules, lines = dict(turn.job.data.item_shifts), list(turn.job.learned.modules), []
    packed = data_lengths.packed(turn.job)
    samples = plan.global_batch if packed is None else packed.sequences
    for at, module in enumerate(modules):
        own = step.modules.get(module.name)
        if own is None:
            continue
        items, rows = _items_and_rows(own, plan.view(module.name))
        before = shifts.get(module.name) or ItemShiftState.begin(module.items_a_sample, module.rows_an_item)
        shifts[module.name], shifted = before.after(items, rows, samples, turn.settings.detect)
        if shifted:
            new = shifts[module.name]
            now = msgspec.structs.replace(
                module,
                items_a_sample=new.items.reference,
                rows_an_item=new.rows.reference,
                output_bytes=module.output_bytes * new.rows.reference / module.rows_an_item,
                profile=_resized(turn, plan, module, new.rows.reference),
            )
            modules[at] = now
            lines.append(
                f"{now.items} of {now.name}: {now.items_a_sample:.2f} in a sample, of {now.rows_an_item:.0f} "
                f"rows, in the mean; before, {module.items_a_sample:.2f} of {module.rows_an_item:.0f}"
            )
    turn.change("data", item_shifts=shifts)
    if not lines:
        return
    turn.change("learned", modules=tuple(modules), sampled=(), first_step=None)
    seconds = step_prediction.predict_anew(turn, packed)
    step_prediction.keep_profile(turn)
    turn.note("shifted", "; ".join(lines), step=step.step, plan=turn.job.number, step_seconds=seconds)


def resizing(job: JobState) -> list[str]:
    """The modules whose items have lately another size than that which their profiles are of."""
    return [name for name, shift in job.data.item_shifts.items() if shift.rows.off_lately]


def _items_and_rows(step: Step, view: Plan) -> tuple[float, float]:
    """The items of a module's step, and their rows."""
    # Of each lane the first device of its first stage stands for all.
    heads = {lane.stages[0].devices[0] for lane in view.by_lane}
    first = [place for place, device in enumerate(step.devices) if device in heads]
    items, rows = (float(step.column(name)[first].sum()) for name in ("micro_batches", "tokens"))
    return items, rows


def _resized(turn: Transaction, plan: Plan, module: ModuleProblem, rows: float) -> ModelProfile:
    """The profile of a module for items of so many rows: as measured where it is fitted, else by shapes."""
    job, profile, view = turn.job, module.profile, plan.view(module.name)
    known = job.pipeline_spec.modules if job.pipeline_spec is not None else ()
    spec = next((each for each in known if each.name == module.name), None)
    if abs(rows / profile.tokens - 1) <= OFF or spec is None:
        return profile
    profile = evaluated(profile, even(profile.tokens), even(rows), item_rise(spec.model))
    if not profile.fitted:
        return profile
    alike = []
    for step in job.steps.last_steps:
        if (own := step.modules.get(module.name)) is None:
            continue
        items, of_all = _items_and_rows(own, view)
        if items and abs(of_all / items / rows - 1) <= OFF:
            alike.append(own)
    return remeasured(profile, view, alike, job.detection.rates.rates)
