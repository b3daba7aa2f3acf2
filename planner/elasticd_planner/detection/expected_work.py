"""What devices had to do in a step, by the model's profile: what their seconds are divided by to be costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.plan import Plan, seats_of
from elasticd_planner.spec.step_measurements import Step


def expectation(profile: ModelProfile, plan: Plan) -> Callable[[Step], Floats]:
    """For `rates.observe`: the work of each device of a step [devices], members of `plan`, in tokens x layers x
    share, with what the profile knows besides: a part in a wide TP group takes longer than that part of the
    whole, and each pass of a block has a fixed time. How cost grows with length is learned in `stragglers`."""
    block = profile.block
    if not block.slowdown and not block.fixed_seconds:
        return lambda step: step.column("block_work")
    seats, fixed = plan.seats, block.fixed_seconds / block.seconds
    # The last ones are of a device that does not compute under this plan.
    slowdown = np.append(block.factors(seats.width)[seats.group], 1.0)
    each = np.append(fixed * seats.layers[seats.group], 0.0)

    def work(step: Step) -> Floats:
        seat = seats_of(plan, step.devices)
        found: Floats = step.column("block_work") * slowdown[seat] + each[seat] * step.column("micro_batches")
        return found

    return work
