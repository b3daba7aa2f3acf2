"""Times of the modules of a job in its newest whole step, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from elasticd_planner.spec.item_batch import NORMAL
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job.state.job_state import JobState

#: The columns of a device's own computation.
_COMPUTED = ("block_seconds", "again_seconds", "embed_seconds", "head_seconds")


class DeviceModuleTimes(NamedTuple):
    """A device in one module in the newest whole step."""

    device: str
    seconds: float  #: of its computation
    #: Of a module of items; 0 elsewhere:
    items: int = 0  #: that its lane took
    share: float = 0.0  #: of the rows of all items
    planned_share: float = 0.0  #: of them as the plan says
    slowdown: float = 0.0  #: its lane's time for a row over the planned one (0: shares do not follow)


class ModuleTimes(NamedTuple):
    """One module in the newest whole step."""

    module: str
    devices: int  #: that compute with it
    busiest: str  #: the device whose computation took longest
    seconds: float  #: of its computation
    items: str = ""  #: the key of what it runs on; empty: samples
    items_a_sample: float = 0.0  #: in the mean of the last steps
    rows_an_item: float = 0.0  #: [tokens] likewise
    by_device: tuple[DeviceModuleTimes, ...] = ()  #: in the order of the plan


def module_times(job: JobState) -> tuple[ModuleTimes, ...]:
    """Of a job of several modules, in the order of the plan; those that computed in the step."""
    plan, steps = job.pipeline_plan, job.steps.last_steps
    if plan is None or len(plan.modules) == 1 or not steps or steps[-1].plan != plan.number:
        return ()
    known, times = {module.name: module for module in job.learned.modules}, []
    for module in plan.modules:
        own = steps[-1].modules.get(module.module) if module.items else steps[-1]
        each = _by_device(own, plan.view(module.module)) if own is not None else ()
        if not any(one.seconds > 0 for one in each):
            continue
        busy = max(each, key=lambda one: one.seconds)
        items = rows = 0.0
        if module.items and (planned := known.get(module.module)) is not None:
            items, rows = planned.items_a_sample, planned.rows_an_item
            if (shift := job.data.item_shifts.get(module.module)) is not None:
                items, rows = shift.items.mean, shift.rows.mean
        times.append(
            ModuleTimes(
                module.module, len(each), busy.device, busy.seconds, module.items, items, rows, tuple(each)
            )
        )
    return tuple(times)


def _by_device(step: Step, view: Plan) -> Sequence[DeviceModuleTimes]:
    """The devices of a module that reported, lane by lane."""
    spent = sum((step.column(name) for name in _COMPUTED), start=np.zeros(len(step.devices)))
    columns = (spent, *(step.column(name) for name in ("micro_batches", "tokens", "slowdown")))
    known = {
        device: row for device, *row in zip(step.devices, *(each.tolist() for each in columns), strict=True)
    }
    lanes = [
        [name for stage in lane.stages for name in stage.devices if name in known] for lane in view.by_lane
    ]
    if not view.module.items:
        return [DeviceModuleTimes(device, known[device][0]) for lane in lanes for device in lane]
    rows = [max((known[device][2] for device in lane), default=0.0) for lane in lanes]
    weights, every = [lane.micro_batches for lane in view.by_lane], sum(rows) or 1.0
    return [
        DeviceModuleTimes(
            device=device,
            seconds=seconds,
            items=int(items),
            share=own / every,
            planned_share=weight / sum(weights),
            slowdown=slowdown / NORMAL,
        )
        for lane, own, weight in zip(lanes, rows, weights, strict=True)
        for device in lane
        for seconds, items, _, slowdown in (known[device],)
    ]
