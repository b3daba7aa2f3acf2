"""Times of the modules of a job in its newest whole step, for people."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job.state.job_state import JobState

#: The columns of a device's own computation.
_COMPUTED = ("block_seconds", "again_seconds", "embed_seconds", "head_seconds")


class ModuleTimes(NamedTuple):
    """One module in the newest whole step."""

    module: str
    devices: int  #: that compute with it
    busiest: str  #: the device whose computation took longest
    seconds: float  #: of its computation
    items: str = ""  #: the key of what it runs on; empty: samples
    items_a_sample: float = 0.0  #: in the mean of the last steps
    rows_an_item: float = 0.0  #: [tokens] likewise


def module_times(job: JobState) -> tuple[ModuleTimes, ...]:
    """Of a job of several modules, in the order of the plan; those that computed in the step."""
    plan, steps = job.plan, job.last_steps
    if plan is None or len(plan.modules) == 1 or not steps or steps[-1].plan != plan.number:
        return ()
    known, found = {module.name: module for module in job.modules}, []
    for module in plan.modules:
        own = steps[-1].modules.get(module.module) if module.items else steps[-1]
        if own is None or (busy := _busiest(own)) is None:
            continue
        items = rows = 0.0
        if module.items and (planned := known.get(module.module)) is not None:
            items, rows = planned.items_a_sample, planned.rows_an_item
            if (shift := job.item_shifts.get(module.module)) is not None:
                items, rows = shift.items.mean, shift.rows.mean
        devices = len(plan.view(module.module).places)
        found.append(ModuleTimes(module.module, devices, *busy, module.items, items, rows))
    return tuple(found)


def _busiest(step: Step) -> tuple[str, float] | None:
    spent = sum((step.column(name) for name in _COMPUTED), start=np.zeros(len(step.devices)))
    if not len(spent) or not spent.max() > 0:
        return None
    at = int(spent.argmax())
    return step.devices[at], float(spent[at])
