"""The work of each device in a step by the model's profile; a device's cost is its seconds over its work."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.numeric import Floats
from elasticd_planner.spec.plan import Plan, seats_of
from elasticd_planner.spec.step_measurements import Step


def expectation(profile: ModelProfile, plan: Plan) -> Callable[[Step], Floats]:
    """The function `work` of `stragglers.observe` for the members of `plan`.

    The work of a device [devices] is tokens x layers x share. From the profile come two corrections: a share in
    a wide TP group takes longer than that part of the whole, and each pass of a block has a fixed time. How the
    cost of a token grows with the length of its sequence is learned in `stragglers`.
    """
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
